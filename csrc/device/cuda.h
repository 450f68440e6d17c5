/* SPDX-License-Identifier: Apache-2.0
 * CUDA backend: memory that is mapped from descriptors, events that are words of registered
 * host memory, streams of the driver.  Contracts are those of device.h. */
#ifndef WSYNC_DEVICE_CUDA_H
#define WSYNC_DEVICE_CUDA_H

#include <stdatomic.h>

#include "device/cuda_driver.h"
#include "device/device.h"
#include "device/pins.h"

/* GPUs that one process may see. */
enum { WSYNC_CUDA_MAX_DEVICES = 16 };

/* A GPU with its primary context, which is retained for the life of the process: the one
 * that torch uses.  No other context is ever made. */
typedef struct wsync_cuda_device {
    const wsync_cuda_driver_t *driver;
    wsync_cu_context_t context;
    wsync_cuda_info_t info;
    wsync_cu_device_t ordinal;
    unsigned processors;  /* streaming multiprocessors */
    uint64_t granularity; /* of memory, in bytes */
    bool vmm;             /* it exports memory as descriptors, and parks it */
    bool pageable;        /* it reaches all of the host's memory where it lies */
} wsync_cuda_device_t;

/* UNSUPPORTED: there is no such GPU, or it cannot do what wsync needs. */
wsync_status_t wsync_cuda_device(int ordinal, const wsync_cuda_device_t **device,
                                 wsync_error_t *err);

/* The same for whoever has the ops of the GPU: it is open, in a fork as well. */
const wsync_cuda_device_t *wsync_cuda_opened(int ordinal);

/* Loads the compiled kernels (what wsync_cuda_compile gives; borrowed for the call), unless
 * that has been done: then image may be NULL.  STATE if it has not and is. */
wsync_status_t wsync_cuda_load_kernels(const wsync_cuda_device_t *device, const void *image,
                                       wsync_error_t *err);
/* wsync_copy of the loaded kernels; NULL before. */
wsync_cu_function_t wsync_cuda_copy_kernel(const wsync_cuda_device_t *device);

/* The backend of the GPU with this UUID, with its kernels loaded.  The table lives as long
 * as the process. */
wsync_status_t wsync_device_cuda(const wsync_cu_uuid_t *uuid, const void *image,
                                 const wsync_device_ops_t **ops, wsync_error_t *err);

/* Makes the GPU's context current in this thread until leave.  STATE in a fork. */
wsync_status_t wsync_cuda_enter(const wsync_cuda_device_t *device, wsync_error_t *err);
/* The same to give something back: false if the context is gone, and with it what was in
 * it, or belongs to the process that this one is a fork of. */
bool wsync_cuda_enter_to_free(const wsync_cuda_device_t *device);
void wsync_cuda_leave(const wsync_cuda_device_t *device);

/* Has the device, and every other one, reach memory of the host, at *at, until unregister;
 * `what` is for the message.  Both in the context; unregister may wait for the device,
 * which has to be through with that memory. */
wsync_status_t wsync_cuda_register(const wsync_cuda_device_t *device, void *data,
                                   uint64_t nbytes, const char *what, wsync_cu_ptr_t *at,
                                   wsync_error_t *err);
void wsync_cuda_unregister(const wsync_cuda_device_t *device, void *data);

/* What wsync_memory_t is on a GPU.  Control memory is host memory (of words.memory) that
 * the device reaches at `at`. */
typedef struct wsync_cuda_memory {
    const wsync_cuda_device_t *device;
    wsync_cu_ptr_t at;
    uint64_t nbytes;
    uint64_t mapped_nbytes;     /* of device memory: a multiple of the granularity */
    bool mapped;                /* device memory lies at `at`, not the addresses alone */
    struct wsync_cuda_ipc *ipc; /* owned: what it is on a device that is not vmm */
    struct wsync_cuda_memory *next; /* of those that peers have open yet */
    int fd;                         /* of device memory: owned; -1 while it is parked */
    atomic_uint references;
    wsync_pins_t pins;
    wsync_memory_t *host;       /* owned, of wsync_host_memory_*; NULL: device memory */
    _Atomic uint64_t *recorded; /* of each word, what this process recorded last; owned */
} wsync_cuda_memory_t;

wsync_status_t wsync_cuda_memory_create(const wsync_cuda_device_t *device, uint64_t nbytes,
                                        wsync_memory_t **memory, wsync_error_t *err);
wsync_status_t wsync_cuda_memory_import(const wsync_cuda_device_t *device, int fd,
                                        uint64_t nbytes, wsync_memory_t **memory,
                                        wsync_error_t *err);
void wsync_cuda_memory_retain(wsync_memory_t *memory);
void wsync_cuda_memory_destroy(wsync_memory_t *memory);
void *wsync_cuda_memory_data(const wsync_memory_t *memory);
uint64_t wsync_cuda_memory_nbytes(const wsync_memory_t *memory);
int wsync_cuda_memory_fd(const wsync_memory_t *memory);
wsync_status_t wsync_cuda_memory_pin(wsync_memory_t *memory, wsync_error_t *err);
void wsync_cuda_memory_unpin(wsync_memory_t *memory);
wsync_status_t wsync_cuda_memory_park(wsync_memory_t *memory, wsync_error_t *err);
wsync_status_t wsync_cuda_memory_unpark(wsync_memory_t *memory, int fd, wsync_error_t *err);

/* The kind of a device that is not vmm.  Both fill a record that has nothing yet, in the
 * context; after an error, what they have filled is for fini. */
wsync_status_t wsync_cuda_legacy_fill(wsync_cuda_memory_t *memory, wsync_error_t *err);
wsync_status_t wsync_cuda_legacy_adopt(wsync_cuda_memory_t *memory, int fd,
                                       wsync_error_t *err);
/* Gives such memory back.  False if a peer has it open: the record is then moved, and given
 * back later. */
bool wsync_cuda_legacy_fini(wsync_cuda_memory_t *memory);

wsync_status_t wsync_cuda_control_create(const wsync_cuda_device_t *device, uint64_t nbytes,
                                         wsync_memory_t **memory, wsync_error_t *err);
wsync_status_t wsync_cuda_control_import(const wsync_cuda_device_t *device, int fd,
                                         uint64_t nbytes, wsync_memory_t **memory,
                                         wsync_error_t *err);
/* Takes the words from the device; for wsync_cuda_memory_destroy, in the context. */
void wsync_cuda_control_fini(wsync_cuda_memory_t *memory);

/* INVALID unless the event is an aligned word of control memory. */
wsync_status_t wsync_cuda_event_check(wsync_event_t event, wsync_error_t *err);
/* Sets the word from the host, if it is below. */
void wsync_cuda_event_set(wsync_event_t event, uint64_t value);
wsync_cu_ptr_t wsync_cuda_event_address(wsync_event_t event);
/* What this process recorded last on the word: streams that do note it there. */
_Atomic uint64_t *wsync_cuda_event_recorded(wsync_event_t event);
wsync_status_t wsync_cuda_event_wait(wsync_event_t event, uint64_t value, int timeout_ms,
                                     wsync_error_t *err);
uint64_t wsync_cuda_event_query(wsync_event_t event);

#endif
