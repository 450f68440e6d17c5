# The kernels' source as arrays of a C file in the build folder: the extension carries it and
# compiles it for the device that it finds.  The first file includes the others.
set(files kernels.cu kernel_table.h quantise_kernels.cu quantise_octets.cu quantise_math.h
  quantise_table.h)
set(lines "#include \"device/cuda_compile.h\"\n")
set(table "")
list(LENGTH files count)
foreach(file IN LISTS files)
  string(MAKE_C_IDENTIFIER ${file} name)
  file(READ ${CMAKE_CURRENT_LIST_DIR}/${file} content HEX)
  string(REPEAT "[0-9a-f]" 32 line)
  string(REGEX REPLACE "(${line})" "\\1\n" content ${content})
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," content ${content})
  string(APPEND lines "static const char ${name}[] = {\n${content}0};\n")
  string(APPEND table "{\"device/${file}\", ${name}},\n")
  set_property(DIRECTORY APPEND PROPERTY
    CMAKE_CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/${file})
endforeach()
string(APPEND lines
  "const wsync_kernel_file_t wsync_kernel_files[WSYNC_KERNEL_FILES] = {\n${table}};\n"
  "_Static_assert(WSYNC_KERNEL_FILES == ${count}, \"cuda_compile.h counts them\");\n")
file(CONFIGURE OUTPUT kernel_source.c CONTENT "${lines}" @ONLY)
target_sources(wsync_device PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/kernel_source.c)
