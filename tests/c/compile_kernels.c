/* SPDX-License-Identifier: Apache-2.0
 * compile_kernels LIBNVRTC CACHE CAPABILITY OUTPUT: what a process that finds a device
 * does, for the gate that tries it with the real NVRTC. */
#include <stdio.h>
#include <stdlib.h>

#include "device/cuda_compile.h"

int main(int argc, char **argv)
{
    wsync_kernel_image_t image = {0};
    wsync_error_t err;
    const char *libraries[1];
    FILE *file;
    size_t written;

    if (argc != 5) {
        return 2;
    }
    libraries[0] = argv[1];
    if (wsync_cuda_compile(&(wsync_compile_spec_t){.libraries = libraries,
                                                   .library_count = 1,
                                                   .cache = argv[2],
                                                   .capability = (unsigned)atoi(argv[3])},
                           &image, &err) != WSYNC_OK) {
        (void)fprintf(stderr, "%s\n", err.message);
        return 1;
    }
    file = fopen(argv[4], "wb");
    written = file == NULL ? 0 : fwrite(image.data, 1, image.nbytes, file);
    if (file == NULL || fclose(file) != 0 || written != image.nbytes) {
        (void)fprintf(stderr, "%s: cannot be written\n", argv[4]);
        return 1;
    }
    (void)printf("%s %zu bytes\n", image.cached ? "cached" : "compiled", image.nbytes);
    wsync_kernel_image_fini(&image);
    return 0;
}
