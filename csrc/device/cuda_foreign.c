/* SPDX-License-Identifier: Apache-2.0
 * Order between streams of this backend and those that somebody else made, torch's above
 * all. */
#include "device/cuda_stream.h"

/* Has `later` wait for what `earlier` has been given by now.  In the context. */
static wsync_status_t put_after(const wsync_cuda_device_t *device,
                                wsync_cu_stream_t earlier, wsync_cu_stream_t later,
                                wsync_error_t *err)
{
    const wsync_cuda_driver_t *driver = device->driver;
    wsync_cu_event_t event = NULL;
    const char *call = "cuEventCreate";
    wsync_cu_result_t code = driver->event_create(&event, WSYNC_CU_EVENT_DISABLE_TIMING);

    if (code == WSYNC_CU_SUCCESS) {
        call = "cuEventRecord";
        code = driver->event_record(event, earlier);
    }
    if (code == WSYNC_CU_SUCCESS) {
        call = "cuStreamWaitEvent";
        code = driver->stream_wait_event(later, event, 0);
    }
    if (event != NULL) {
        (void)driver->event_destroy(event); /* lives on until it has been waited for */
    }
    return code == WSYNC_CU_SUCCESS
               ? WSYNC_OK
               : wsync_cuda_fail(driver, code, call, err, "two streams of GPU %d (%s)",
                                 device->ordinal, device->info.name);
}

static wsync_status_t in_context(const wsync_cuda_device_t *device,
                                 wsync_cu_stream_t earlier, wsync_cu_stream_t later,
                                 wsync_error_t *err)
{
    wsync_status_t status = wsync_cuda_enter(device, err);

    if (status == WSYNC_OK) {
        status = put_after(device, earlier, later, err);
        wsync_cuda_leave(device);
    }
    return status;
}

wsync_status_t wsync_cuda_stream_follow(wsync_stream_t *stream, void *other,
                                        wsync_error_t *err)
{
    return in_context(wsync_cuda_stream_device(stream), other,
                      wsync_cuda_stream_handle(stream), err);
}

wsync_status_t wsync_cuda_stream_lead(wsync_stream_t *stream, void *other,
                                      wsync_error_t *err)
{
    return in_context(wsync_cuda_stream_device(stream), wsync_cuda_stream_handle(stream),
                      other, err);
}
