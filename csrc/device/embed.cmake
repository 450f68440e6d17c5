# The kernels' source as arrays of a C file in the build folder: the extension carries it and
# compiles it for the device that it finds.
set(lines "#include \"device/cuda_compile.h\"\n")
foreach(pair IN ITEMS kernels.cu:wsync_kernel_source kernel_table.h:wsync_kernel_header)
  string(REPLACE ":" ";" pair ${pair})
  list(GET pair 0 file)
  list(GET pair 1 name)
  file(READ ${CMAKE_CURRENT_LIST_DIR}/${file} content HEX)
  string(REPEAT "[0-9a-f]" 32 line)
  string(REGEX REPLACE "(${line})" "\\1\n" content ${content})
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," content ${content})
  string(APPEND lines "const char ${name}[] = {\n${content}0};\n")
  set_property(DIRECTORY APPEND PROPERTY
    CMAKE_CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/${file})
endforeach()
file(CONFIGURE OUTPUT kernel_source.c CONTENT "${lines}" @ONLY)
target_sources(wsync_device PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/kernel_source.c)
