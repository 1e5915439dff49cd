# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# Watches that kvblend leaves the project that takes it as it was: remember before, compare after.

# Settings a project may have made; whatever value they have, or that they have none, must stay.
set(consumer_watched
    BUILD_SHARED_LIBS
    BUILD_TESTING
    CMAKE_BUILD_TYPE
    CMAKE_CXX_EXTENSIONS
    CMAKE_CXX_FLAGS
    CMAKE_CXX_FLAGS_DEBUG
    CMAKE_CXX_FLAGS_RELEASE
    CMAKE_CXX_STANDARD
    CMAKE_CXX_STANDARD_REQUIRED
    CMAKE_CXX_VISIBILITY_PRESET
    CMAKE_C_FLAGS
    CMAKE_EXE_LINKER_FLAGS
    CMAKE_EXPORT_COMPILE_COMMANDS
    CMAKE_INTERPROCEDURAL_OPTIMIZATION
    CMAKE_MESSAGE_LOG_LEVEL
    CMAKE_MODULE_PATH
    CMAKE_POSITION_INDEPENDENT_CODE
    CMAKE_PREFIX_PATH
    CMAKE_RUNTIME_OUTPUT_DIRECTORY
    CMAKE_SHARED_LINKER_FLAGS)

# A project's own choices, unlike anything that kvblend would choose.
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_FLAGS "${CMAKE_CXX_FLAGS} -DCONSUMER_FLAG=1")
set(BUILD_SHARED_LIBS ON)

# Sets consumer_state_<when> to all that is watched, as text.
macro(consumer_remember when)
  set(consumer_state_${when} "")
  foreach(name IN LISTS consumer_watched)
    if(DEFINED ${name})
      string(APPEND consumer_state_${when} "${name}=${${name}}\n")
    else()
      string(APPEND consumer_state_${when} "${name} is not set\n")
    endif()
  endforeach()
  foreach(name COMPILE_DEFINITIONS COMPILE_OPTIONS INCLUDE_DIRECTORIES LINK_LIBRARIES LINK_OPTIONS TESTS)
    get_property(value DIRECTORY PROPERTY ${name})
    string(APPEND consumer_state_${when} "${name}: ${value}\n")
  endforeach()
  foreach(name RULE_LAUNCH_COMPILE RULE_LAUNCH_LINK ENABLED_LANGUAGES)
    get_property(value GLOBAL PROPERTY ${name})
    string(APPEND consumer_state_${when} "${name}: ${value}\n")
  endforeach()
  # Options and other entries of the cache. Those that CMake's own find_package and FetchContent make are left out.
  get_property(names DIRECTORY PROPERTY CACHE_VARIABLES)
  list(FILTER names EXCLUDE REGEX "^(KVBLEND|FETCHCONTENT)_|^kvblend_(BINARY|SOURCE)_DIR$|^kvblend_IS_TOP_LEVEL$|_DIR$")
  foreach(name IN LISTS names)
    get_property(type CACHE ${name} PROPERTY TYPE)
    if(NOT type MATCHES "INTERNAL|STATIC")
      string(APPEND consumer_state_${when} "cache: ${name}\n")
    endif()
  endforeach()
endmacro()

# Fails if something changed, or if kvblend's folder holds a target or test of another's name.
macro(consumer_compare)
  consumer_remember(after)
  if(NOT consumer_state_before STREQUAL consumer_state_after)
    message(FATAL_ERROR "kvblend changed its parent project.\nBefore:\n${consumer_state_before}\n"
                        "After:\n${consumer_state_after}")
  endif()
  foreach(directory IN ITEMS ${ARGN})
    get_property(targets DIRECTORY "${directory}" PROPERTY BUILDSYSTEM_TARGETS)
    get_property(subdirectories DIRECTORY "${directory}" PROPERTY SUBDIRECTORIES)
    get_property(tests DIRECTORY "${directory}" PROPERTY TESTS)
    foreach(target IN LISTS targets)
      get_target_property(type ${target} TYPE)
      if(NOT target MATCHES "^kvblend" OR NOT type STREQUAL "INTERFACE_LIBRARY")
        message(FATAL_ERROR "kvblend brought the target ${target} (${type}) into its parent project")
      endif()
    endforeach()
    if(subdirectories OR tests)
      message(FATAL_ERROR "kvblend brought tests, examples or benchmarks: ${subdirectories} ${tests}")
    endif()
  endforeach()
endmacro()

# The program: plain, and with the components that are there.
macro(consumer_add_program)
  add_executable(consumer "${CMAKE_CURRENT_LIST_DIR}/../main.cpp" "${CMAKE_CURRENT_LIST_DIR}/../other.cpp")
  set_target_properties(consumer PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}")
  target_link_libraries(consumer PRIVATE kvblend::kvblend)
  foreach(component eigen store)
    if(TARGET kvblend::${component})
      string(TOUPPER ${component} upper)
      target_link_libraries(consumer PRIVATE kvblend::${component})
      target_compile_definitions(consumer PRIVATE CONSUMER_HAS_${upper})
    endif()
  endforeach()
endmacro()
