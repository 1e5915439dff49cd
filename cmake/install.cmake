# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# Install rules and the package: find_package(kvblend COMPONENTS eigen store cuda). Each component has its own export file,
# so a project that asks for none needs neither Eigen nor nlohmann-json.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(kvblend_package_dir "${CMAKE_INSTALL_DATADIR}/cmake/kvblend")

get_property(kvblend_components GLOBAL PROPERTY KVBLEND_COMPONENTS)
foreach(component IN LISTS kvblend_components)
  get_target_property(target kvblend::${component} ALIASED_TARGET)
  install(
    TARGETS ${target}
    EXPORT kvblend_${component}
    FILE_SET HEADERS
    DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
  install(
    EXPORT kvblend_${component}
    NAMESPACE kvblend::
    FILE kvblend-${component}.cmake
    DESTINATION "${kvblend_package_dir}")
endforeach()

configure_package_config_file(
  "${PROJECT_SOURCE_DIR}/cmake/kvblendConfig.cmake.in" "${PROJECT_BINARY_DIR}/cmake/kvblendConfig.cmake"
  INSTALL_DESTINATION "${kvblend_package_dir}")
# Before 1.0 a minor version may change names.
write_basic_package_version_file("${PROJECT_BINARY_DIR}/cmake/kvblendConfigVersion.cmake"
                                 COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES "${PROJECT_BINARY_DIR}/cmake/kvblendConfig.cmake" "${PROJECT_BINARY_DIR}/cmake/kvblendConfigVersion.cmake"
              "${PROJECT_SOURCE_DIR}/cmake/kvblend_xxhash.cmake" "${PROJECT_SOURCE_DIR}/cmake/kvblend_cccl.cmake"
        DESTINATION "${kvblend_package_dir}")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}")
