# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# The library's targets. kvblend::kvblend needs the standard library alone; each further target exists only where the
# packages it needs are found, so a project without Eigen still gets kvblend::kvblend.

set(kvblend_include_dir "${PROJECT_SOURCE_DIR}/include")

# Declares kvblend::<component> with the headers that match the patterns, relative to include/kvblend.
function(kvblend_add_component component)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "HEADERS;LINK")
  if(component STREQUAL "kvblend")
    set(target kvblend)
  else()
    set(target kvblend_${component})
  endif()
  list(TRANSFORM arg_HEADERS PREPEND "${kvblend_include_dir}/kvblend/")
  file(GLOB headers CONFIGURE_DEPENDS ${arg_HEADERS})

  add_library(${target} INTERFACE)
  add_library(kvblend::${component} ALIAS ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${component})
  target_compile_features(${target} INTERFACE cxx_std_20)
  target_sources(
    ${target}
    INTERFACE FILE_SET HEADERS
              BASE_DIRS "${kvblend_include_dir}"
              FILES ${headers})
  if(arg_LINK)
    target_link_libraries(${target} INTERFACE ${arg_LINK})
  endif()
  set_property(GLOBAL APPEND PROPERTY KVBLEND_COMPONENTS ${component})
endfunction()

kvblend_add_component(
  kvblend
  HEADERS
    kvblend.hpp
    core/*.hpp
    codec/*.hpp
    memory/*.hpp
    rope/*.hpp
    select/*.hpp
    prompt/*.hpp
    plan/*.hpp
    fuse/*.hpp)

find_package(Eigen3 3.4 QUIET NO_MODULE)
if(TARGET Eigen3::Eigen)
  kvblend_add_component(eigen HEADERS eigen.hpp eigen/*.hpp LINK kvblend::kvblend Eigen3::Eigen)
endif()

find_package(nlohmann_json 3.7 QUIET)
find_package(Threads QUIET)
include("${CMAKE_CURRENT_LIST_DIR}/kvblend_xxhash.cmake")
if(TARGET nlohmann_json::nlohmann_json AND TARGET kvblend::xxhash AND TARGET Threads::Threads)
  kvblend_add_component(
    store
    HEADERS store.hpp store/*.hpp
    LINK kvblend::kvblend nlohmann_json::nlohmann_json kvblend::xxhash Threads::Threads)
endif()

# The headers alone: a project that compiles .cu files brings its compiler and runtime.
include("${CMAKE_CURRENT_LIST_DIR}/kvblend_cccl.cmake")
if(TARGET kvblend::cccl)
  kvblend_add_component(cuda HEADERS cuda.cuh cuda/*.hpp cuda/*.cuh LINK kvblend::kvblend kvblend::cccl)
endif()
