/* SPDX-License-Identifier: Apache-2.0
 * CUDA backend: memory that is mapped from descriptors, events that are words of registered
 * host memory, streams of the driver.  Contracts are those of device.h.
 *
 *   cuda.c                opens a GPU and loads its kernels; contexts
 *   cuda_memory.c         memory as descriptors
 *   cuda_ipc.c            memory as IPC handles
 *   cuda_lend.c           memory of others than wsync, lent and borrowed
 *   cuda_stream.c         waits, records and ends; gives batches to cuda_runner.c
 *   cuda_runner.c         a batch: has spans and tables looked up, launches or feeds
 *   cuda_runs.c           what copy engines copy of it
 *   cuda_quantise.c       the same for a batch of pieces
 *   cuda_spans.c          what lies at an address, and whose memory a span is
 *   cuda_tables.c         addresses, and what kernel_segments.c and kernel_quantise.c make,
 *                         on the device
 *   cuda_pageable_feed.c  what the device does not reach, by a stream of the host
 *   cuda_compile.c        the kernels' image; cuda_compile_cache.c keeps it
 *   cuda_driver.c         the driver's functions, called by all of these but cuda_compile.c
 *
 * The Python layer has the image made, and hands it to cuda.c. */
#ifndef WSYNC_DEVICE_CUDA_H
#define WSYNC_DEVICE_CUDA_H

#include "device/cuda_driver.h"
#include "device/device.h"

enum { WSYNC_CUDA_LABEL_NBYTES = WSYNC_CUDA_NAME_NBYTES + 24 };

/* A GPU with its primary context, which is retained for the life of the process: the one
 * that torch uses.  No other context is ever made. */
typedef struct wsync_cuda_device {
    wsync_device_t base;
    const wsync_cuda_driver_t *driver;
    wsync_cu_context_t context;
    wsync_cuda_info_t info;
    char label[WSYNC_CUDA_LABEL_NBYTES]; /* for messages: "GPU 1 (NVIDIA H100)" */
    unsigned processors;                 /* streaming multiprocessors */
    uint64_t granularity;                /* of memory, in bytes */
    bool pageable; /* it reaches all of the host's memory where it lies */
    bool mps;      /* IPC handles cross only to other clients of MPS */
    _Atomic(wsync_cu_function_t) copy_kernel;     /* wsync_copy; NULL until it is loaded */
    _Atomic(wsync_cu_function_t) quantise_kernel; /* wsync_quantise; loaded with it */
    struct wsync_cuda_device *next;               /* of those that are open */
} wsync_cuda_device_t;

/* What a device of this backend is. */
static inline const wsync_cuda_device_t *wsync_cuda_of(const wsync_device_t *device)
{
    return (const wsync_cuda_device_t *)(const void *)device;
}

/* UNSUPPORTED: there is no such GPU, or it cannot do what wsync needs. */
wsync_status_t wsync_cuda_device(int ordinal, const wsync_cuda_device_t **device,
                                 wsync_error_t *err);

/* The GPU with this UUID, with its kernels loaded.  `image` is what wsync_cuda_compile
 * gives (borrowed for the call); it may be NULL if the kernels are loaded already,
 * otherwise that is STATE. */
wsync_status_t wsync_device_cuda(const wsync_cu_uuid_t *uuid, const void *image,
                                 const wsync_device_t **device, wsync_error_t *err);

/* Whether the GPU maps memory of another one of this process, by its ordinal; *uuid is that
 * one's. */
wsync_status_t wsync_cuda_reaches(const wsync_cuda_device_t *device, int ordinal,
                                  bool *reaches, wsync_cu_uuid_t *uuid, wsync_error_t *err);

/* Makes the GPU's context current in this thread until leave.  STATE in a fork. */
wsync_status_t wsync_cuda_enter(const wsync_cuda_device_t *device, wsync_error_t *err);
/* The same before something is freed.  False if there is nothing to free here: the context
 * and all that was in it are gone, or belong to the parent of this fork. */
bool wsync_cuda_enter_to_free(const wsync_cuda_device_t *device);
void wsync_cuda_leave(const wsync_cuda_device_t *device);

/* Bytes of the device that nobody uses now; not in the context. */
wsync_status_t wsync_cuda_free_nbytes(const wsync_cuda_device_t *device, uint64_t *nbytes,
                                      wsync_error_t *err);

/* Pins memory of the host and maps it for all devices, at *at, until unregister.  `what`
 * names it in errors.  Call both in the context.  No work of a device may use the memory
 * any more at unregister, which may wait for the device. */
wsync_status_t wsync_cuda_register(const wsync_cuda_device_t *device, void *data,
                                   uint64_t nbytes, const char *what, wsync_cu_ptr_t *at,
                                   wsync_error_t *err);
void wsync_cuda_unregister(const wsync_cuda_device_t *device, void *data);

/* Of memory that is lent or borrowed in pieces side by side. */
typedef struct wsync_cuda_piece {
    wsync_cu_handle_t handle; /* retained, of what is lent */
    uint64_t nbytes;
} wsync_cuda_piece_t;

/* What wsync_memory_t is on a GPU.  Control memory is host memory that the device reaches
 * at base.data. */
typedef struct wsync_cuda_memory {
    wsync_memory_t base;
    wsync_cu_ptr_t at;          /* base.data as the driver writes it */
    uint64_t mapped_nbytes;     /* of device memory: a multiple of the granularity */
    bool mapped;                /* device memory lies at `at`, not the addresses alone */
    struct wsync_cuda_ipc *ipc; /* owned: what is borrowed by its handle */
    bool foreign;               /* somebody else's, which is lent from here */
    wsync_cuda_piece_t *pieces; /* owned; retained if it is foreign, else mapped */
    size_t piece_count;
    wsync_memory_t *host;       /* owned; NULL: device memory */
    _Atomic uint64_t *recorded; /* of each word, what this process recorded last; owned */
} wsync_cuda_memory_t;

extern const wsync_memory_ops_t wsync_cuda_memory_ops;
extern const wsync_stream_ops_t wsync_cuda_stream_ops;

/* Memory without a record, which other processes can map by a descriptor like all other,
 * for an allocator that keeps its own: nbytes of it, whose contents are anything. */
wsync_status_t wsync_cuda_take(const wsync_cuda_device_t *device, uint64_t nbytes,
                               wsync_cu_ptr_t *at, wsync_error_t *err);
/* Gives it back, of the same nbytes, when everything has run that this stream of the driver
 * (NULL: the default one) was given.  Nothing in a fork.  What the driver refuses to unmap
 * stays for the life of the process. */
void wsync_cuda_give(const wsync_cuda_device_t *device, wsync_cu_ptr_t at, uint64_t nbytes,
                     wsync_cu_stream_t stream);
/* What a descriptor (borrowed) stands for; in the context.  REFUSED if that is no memory of
 * a GPU.  The handle is the caller's to release. */
wsync_status_t wsync_cuda_import_handle(const wsync_cuda_device_t *device, int fd,
                                        wsync_cu_handle_t *handle, wsync_error_t *err);

/* Unmaps memory, in the context; SUCCESS also if it was unmapped with an error. */
wsync_cu_result_t wsync_cuda_unmap(const wsync_cuda_driver_t *driver, wsync_cu_ptr_t at,
                                   uint64_t nbytes);

/* Memory that is foreign, or lent by a peer. */
wsync_status_t wsync_cuda_borrow(const wsync_device_t *self, const int *fds, size_t count,
                                 wsync_memory_t **memory, wsync_error_t *err);
wsync_status_t wsync_cuda_lent_park(wsync_cuda_memory_t *memory, wsync_error_t *err);
void wsync_cuda_lent_destroy(wsync_cuda_memory_t *memory);

wsync_cu_ptr_t wsync_cuda_event_address(wsync_event_t event);
/* What this process recorded last on the word: streams that do note it there. */
_Atomic uint64_t *wsync_cuda_event_recorded(wsync_event_t event);

#endif
