/* SPDX-License-Identifier: Apache-2.0
 * The kernels for one device: compiled at first use by NVRTC, which is looked up at run
 * time, and kept on disk for the next process. */
#ifndef WSYNC_DEVICE_CUDA_COMPILE_H
#define WSYNC_DEVICE_CUDA_COMPILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/status.h"

/* A file of the kernels as it was when the extension was built, under the name by which the
 * others include it. */
typedef struct wsync_kernel_file {
    const char *name;
    const char *text;
} wsync_kernel_file_t;

enum { WSYNC_KERNEL_FILES = 6 };

/* kernels.cu, which includes the others, comes first. */
extern const wsync_kernel_file_t wsync_kernel_files[WSYNC_KERNEL_FILES];

typedef struct wsync_compile_spec {
    /* Paths at which libnvrtc may lie (the wheels' folders), tried after one that the
     * process has loaded and before the system's. */
    const char *const *libraries;
    size_t library_count;
    const char *cache;   /* folder of the disk cache, made if need be; NULL: none */
    unsigned capability; /* of the device: 90 for compute capability 9.0 */
    int driver; /* CUDA version of the driver that is to load them: 12080; 0: any */
} wsync_compile_spec_t;

/* What cuModuleLoadData takes: machine code, or PTX that ends in NUL if this NVRTC does not
 * know the device yet. */
typedef struct wsync_kernel_image {
    void *data;
    size_t nbytes;
    bool cached; /* it came from the disk */
} wsync_kernel_image_t;

/* UNSUPPORTED, and says where it looked: no NVRTC, or one that knows only newer devices; or
 * with NVRTC's log: the source does not compile.  A cache that cannot be used, for whatever
 * reason, only means that the kernels are compiled again. */
wsync_status_t wsync_cuda_compile(const wsync_compile_spec_t *spec,
                                  wsync_kernel_image_t *image, wsync_error_t *err);
void wsync_kernel_image_fini(wsync_kernel_image_t *image);

#endif
