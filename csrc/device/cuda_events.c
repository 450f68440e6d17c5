/* SPDX-License-Identifier: Apache-2.0 */
#include "device/cuda_events.h"

#include <stdlib.h>

typedef struct word {
    wsync_event_t event;
    uint64_t value;
} word_t;

static wsync_status_t check(const wsync_cuda_device_t *device, wsync_cu_result_t code,
                            const char *call, wsync_error_t *err)
{
    return wsync_cuda_check(device->driver, code, call, err, "a stream of %s",
                            device->label);
}

/* Runs in the stream's order, on a thread of the driver, and may not call that. */
static void set_word(void *argument)
{
    const word_t *word = argument;

    wsync_event_set(word->event, word->value);
}

static wsync_status_t record_by_host(const wsync_cuda_device_t *device,
                                     wsync_cu_stream_t stream, wsync_event_t event,
                                     uint64_t value, void **kept, wsync_error_t *err)
{
    word_t *word = malloc(sizeof(*word));
    wsync_cu_result_t code;

    if (word == NULL) {
        return wsync_fail(err, WSYNC_ERR_NO_MEMORY, 0, "malloc",
                          "no memory for the record of an event");
    }
    *word = (word_t){event, value};
    code = device->driver->launch_host(stream, set_word, word);
    if (code != WSYNC_CU_SUCCESS) {
        free(word);
    } else {
        *kept = word;
    }
    return check(device, code, "cuLaunchHostFunc", err);
}

wsync_status_t wsync_cuda_events_record(const wsync_cuda_device_t *device,
                                        wsync_cu_stream_t stream, wsync_event_t event,
                                        uint64_t value, void **kept, wsync_error_t *err)
{
    *kept = NULL;
    return device->words ? check(device,
                                 device->driver->stream_write_value(
                                     stream, wsync_cuda_event_address(event), value, 0),
                                 "cuStreamWriteValue64", err)
                         : record_by_host(device, stream, event, value, kept, err);
}

wsync_status_t wsync_cuda_events_wait(const wsync_cuda_device_t *device,
                                      wsync_cu_stream_t stream, wsync_event_t event,
                                      uint64_t value, wsync_error_t *err)
{
    return check(device,
                 device->driver->stream_wait_value(stream, wsync_cuda_event_address(event),
                                                   value, WSYNC_CU_WAIT_GEQ),
                 "cuStreamWaitValue64", err);
}
