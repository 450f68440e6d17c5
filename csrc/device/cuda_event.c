/* SPDX-License-Identifier: Apache-2.0
 * Events are words of host memory that every process maps and registers with its device:
 * streams write them and wait for them with stream memory operations, and the host reads
 * them.  Interprocess events of the driver would need one PID namespace, know no numbers,
 * and a stream that waits for a process that died could not be told to go on: a word is
 * set by whoever gives up. */
#include <inttypes.h>
#include <stdlib.h>
#include <time.h>

#include "device/cuda.h"
#include "device/host.h"

enum {
    /* The device wakes nobody: the host looks, at first at once and then at this pace. */
    POLL_MIN_NS = 2 * 1000,
    POLL_MAX_NS = 100 * 1000,
    CONTROL_MAX_NBYTES = 1 << 20,
};

static wsync_cuda_memory_t *own(wsync_memory_t *memory)
{
    return (wsync_cuda_memory_t *)(void *)memory;
}

/* Moves `host` into a control memory, also on failure. */
static wsync_status_t register_words(const wsync_cuda_device_t *device,
                                     wsync_memory_t *host, wsync_memory_t **memory,
                                     wsync_error_t *err)
{
    const uint64_t nbytes = wsync_host_memory_nbytes(host);
    wsync_cuda_memory_t *made = calloc(1, sizeof(*made));
    _Atomic uint64_t *recorded = calloc(nbytes / sizeof(uint64_t) + 1, sizeof(*recorded));
    wsync_status_t status;

    if (made == NULL || recorded == NULL) {
        free(made);
        free(recorded);
        wsync_host_memory_destroy(host);
        return wsync_fail(err, WSYNC_ERR_NO_MEMORY, 0, "calloc",
                          "no memory for the record of %" PRIu64 " bytes of events",
                          nbytes);
    }
    *made = (wsync_cuda_memory_t){
        .device = device, .nbytes = nbytes, .fd = -1, .host = host, .recorded = recorded};
    atomic_init(&made->references, 1);
    status = wsync_cuda_register(device, wsync_host_memory_data(host), nbytes, "events",
                                 &made->at, err);
    if (status != WSYNC_OK) {
        wsync_cuda_memory_destroy((wsync_memory_t *)(void *)made);
        return status;
    }
    *memory = (wsync_memory_t *)(void *)made;
    return WSYNC_OK;
}

wsync_status_t wsync_cuda_control_create(const wsync_cuda_device_t *device, uint64_t nbytes,
                                         wsync_memory_t **memory, wsync_error_t *err)
{
    wsync_memory_t *host = NULL;
    wsync_status_t status = wsync_cuda_enter(device, err);

    if (status != WSYNC_OK) {
        return status;
    }
    status = nbytes > CONTROL_MAX_NBYTES
                 ? wsync_fail(err, WSYNC_ERR_INVALID, 0, "wsync_control_create",
                              "%" PRIu64 " bytes of events: at most %d", nbytes,
                              (int)CONTROL_MAX_NBYTES)
                 : wsync_host_memory_create(nbytes, &host, err);
    if (status == WSYNC_OK) {
        status = register_words(device, host, memory, err);
    }
    wsync_cuda_leave(device);
    return status;
}

wsync_status_t wsync_cuda_control_import(const wsync_cuda_device_t *device, int fd,
                                         uint64_t nbytes, wsync_memory_t **memory,
                                         wsync_error_t *err)
{
    wsync_memory_t *host = NULL;
    wsync_status_t status = wsync_cuda_enter(device, err);

    if (status != WSYNC_OK) {
        return status;
    }
    status = wsync_host_memory_import(fd, nbytes, &host, err);
    if (status == WSYNC_OK) {
        status = register_words(device, host, memory, err);
    }
    wsync_cuda_leave(device);
    return status;
}

void wsync_cuda_control_fini(wsync_cuda_memory_t *memory)
{
    if (memory->host != NULL && memory->at != 0) {
        wsync_cuda_unregister(memory->device, wsync_host_memory_data(memory->host));
    }
}

static wsync_event_t host_event(wsync_event_t event)
{
    return (wsync_event_t){.memory = own(event.memory)->host, .offset = event.offset};
}

wsync_status_t wsync_cuda_event_check(wsync_event_t event, wsync_error_t *err)
{
    if (own(event.memory)->host == NULL) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "wsync_event",
                          "event at offset %" PRIu64
                          " of GPU memory: events are words of control memory",
                          event.offset);
    }
    return wsync_host_event_check(host_event(event), err);
}

void wsync_cuda_event_set(wsync_event_t event, uint64_t value)
{
    wsync_host_event_set(host_event(event), value);
}

wsync_cu_ptr_t wsync_cuda_event_address(wsync_event_t event)
{
    return own(event.memory)->at + event.offset;
}

_Atomic uint64_t *wsync_cuda_event_recorded(wsync_event_t event)
{
    return &own(event.memory)->recorded[event.offset / sizeof(uint64_t)];
}

uint64_t wsync_cuda_event_query(wsync_event_t event)
{
    return wsync_host_event_query(host_event(event));
}

wsync_status_t wsync_cuda_event_wait(wsync_event_t event, uint64_t value, int timeout_ms,
                                     wsync_error_t *err)
{
    const uint64_t deadline = wsync_host_deadline(timeout_ms);
    struct timespec pause = {.tv_nsec = POLL_MIN_NS};
    const wsync_status_t status = wsync_cuda_event_check(event, err);

    if (status != WSYNC_OK) {
        return status;
    }
    for (;;) {
        const uint64_t seen = wsync_cuda_event_query(event);

        if (seen >= value) {
            return WSYNC_OK;
        }
        if (wsync_host_deadline(0) >= deadline) {
            /* No time in the text: callers wait in slices. */
            return wsync_fail(err, WSYNC_ERR_TIMEOUT, 0, "wsync_event_wait",
                              "event at offset %" PRIu64 " is %" PRIu64
                              ", waited for %" PRIu64,
                              event.offset, seen, value);
        }
        (void)nanosleep(&pause, NULL);
        pause.tv_nsec *= pause.tv_nsec < POLL_MAX_NS ? 2 : 1;
    }
}
