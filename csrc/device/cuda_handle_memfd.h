/* SPDX-License-Identifier: Apache-2.0
 * A sealed memfd that says what memory of a GPU another process is to open: what crosses
 * for memory that has no descriptor of its own, or more than one. */
#ifndef WSYNC_DEVICE_CUDA_HANDLE_MEMFD_H
#define WSYNC_DEVICE_CUDA_HANDLE_MEMFD_H

#include "device/cuda.h"

/* How it begins; uint64_t[] follow, the sizes of the pieces whose descriptors go with it.
 */
typedef struct wsync_cuda_handle_memfd {
    uint64_t magic;
    uint64_t nbytes;
    wsync_cu_uuid_t uuid;
    wsync_cu_ipc_t handle; /* without pieces; else all 0 */
    uint64_t process[2];   /* whose it is, where that is to know its own */
    wsync_cu_ptr_t at;     /* in that process */
} wsync_cuda_handle_memfd_t;

/* Writes note and sizes to a memfd, *fd.  The magic is filled in. */
wsync_status_t wsync_cuda_handle_memfd_write(const wsync_cuda_handle_memfd_t *note,
                                             const uint64_t *sizes, size_t count, int *fd,
                                             wsync_error_t *err);
/* Opens what a peer has sent, of which `fd` is borrowed: *own, also after an error, has a
 * description of its own, whose locks are no other's.  REFUSED unless it is a sealed note
 * with the sizes of `count` pieces. */
wsync_status_t wsync_cuda_handle_memfd_read(int fd, int *own,
                                            wsync_cuda_handle_memfd_t *note,
                                            uint64_t *sizes, size_t count,
                                            wsync_error_t *err);
/* REFUSED unless it is of memory on this GPU. */
wsync_status_t wsync_cuda_handle_memfd_check(const wsync_cuda_handle_memfd_t *note,
                                             const wsync_cuda_device_t *device,
                                             wsync_error_t *err);

#endif
