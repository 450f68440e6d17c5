/* SPDX-License-Identifier: Apache-2.0
 * GPU memory that other processes open by the driver's older handles, 64 bytes that stand
 * for an allocation: engines without wsync, which get them as torch does, and peers on GPUs
 * that export no descriptors (see cuda.h). */
#ifndef WSYNC_DEVICE_CUDA_IPC_H
#define WSYNC_DEVICE_CUDA_IPC_H

#include "device/cuda.h"

typedef struct wsync_cuda_ipc {
    const wsync_cuda_device_t *device;
    wsync_cu_ptr_t at; /* the start of the allocation */
    uint64_t nbytes;
    wsync_cu_ipc_t handle;
    bool opened; /* another process's */
} wsync_cuda_ipc_t;

/* An allocation of its own of at least nbytes: a multiple of the granularity, because a
 * handle opens all that shares such a piece.  Not cleared. */
wsync_status_t wsync_cuda_ipc_create(const wsync_cuda_device_t *device, uint64_t nbytes,
                                     wsync_cuda_ipc_t **memory, wsync_error_t *err);

/* What a handle stands for, whole.  The driver maps it once a process and counts how often
 * it is open.  STATE in the process that has made it, CLOSED if it is there no more. */
wsync_status_t wsync_cuda_ipc_open(const wsync_cuda_device_t *device,
                                   const wsync_cu_ipc_t *handle, wsync_cuda_ipc_t **memory,
                                   wsync_error_t *err);

/* Frees or closes.  No work on it may be under way, and nobody may have open what is freed:
 * the driver leaves undefined what they would see. */
void wsync_cuda_ipc_destroy(wsync_cuda_ipc_t *memory);

#endif
