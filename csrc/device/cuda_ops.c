/* SPDX-License-Identifier: Apache-2.0
 * CUDA backend: the ops tables.  What makes memory and streams has no argument for the GPU
 * that they are of, so each GPU has functions, and a table, of its own. */
#include <string.h>

#include "device/cuda.h"
#include "device/cuda_stream.h"

#define ORDINAL_MAP(X) \
    X(0)               \
    X(1)               \
    X(2)               \
    X(3)               \
    X(4)               \
    X(5)               \
    X(6)               \
    X(7)               \
    X(8)               \
    X(9)               \
    X(10)              \
    X(11)              \
    X(12)              \
    X(13)              \
    X(14)              \
    X(15)

#define FUNCTIONS(n)                                                                      \
    static wsync_device_identity_t identity_##n(void)                                     \
    {                                                                                     \
        wsync_device_identity_t identity = {.ordinal = (n)};                              \
                                                                                          \
        memcpy(identity.uuid, wsync_cuda_opened(n)->info.uuid.bytes,                      \
               sizeof(identity.uuid));                                                    \
        return identity;                                                                  \
    }                                                                                     \
    static wsync_status_t memory_create_##n(uint64_t nbytes, wsync_memory_t **memory,     \
                                            wsync_error_t *err)                           \
    {                                                                                     \
        return wsync_cuda_memory_create(wsync_cuda_opened(n), nbytes, memory, err);       \
    }                                                                                     \
    static wsync_status_t memory_import_##n(int fd, uint64_t nbytes,                      \
                                            wsync_memory_t **memory, wsync_error_t *err)  \
    {                                                                                     \
        return wsync_cuda_memory_import(wsync_cuda_opened(n), fd, nbytes, memory, err);   \
    }                                                                                     \
    static wsync_status_t control_create_##n(uint64_t nbytes, wsync_memory_t **memory,    \
                                             wsync_error_t *err)                          \
    {                                                                                     \
        return wsync_cuda_control_create(wsync_cuda_opened(n), nbytes, memory, err);      \
    }                                                                                     \
    static wsync_status_t control_import_##n(int fd, uint64_t nbytes,                     \
                                             wsync_memory_t **memory, wsync_error_t *err) \
    {                                                                                     \
        return wsync_cuda_control_import(wsync_cuda_opened(n), fd, nbytes, memory, err);  \
    }                                                                                     \
    static wsync_status_t stream_create_##n(unsigned threads, wsync_stream_t **stream,    \
                                            wsync_error_t *err)                           \
    {                                                                                     \
        return wsync_cuda_stream_create(wsync_cuda_opened(n), threads, stream, err);      \
    }
ORDINAL_MAP(FUNCTIONS)
#undef FUNCTIONS

wsync_status_t wsync_device_cuda(const wsync_cu_uuid_t *uuid, const void *image,
                                 const wsync_device_ops_t **ops, wsync_error_t *err)
{
#define OPS(n)                                               \
    {                                                        \
        .name = "cuda",                                      \
        .identity = identity_##n,                            \
        .memory_create = memory_create_##n,                  \
        .memory_import = memory_import_##n,                  \
        .control_create = control_create_##n,                \
        .control_import = control_import_##n,                \
        .memory_retain = wsync_cuda_memory_retain,           \
        .memory_destroy = wsync_cuda_memory_destroy,         \
        .memory_data = wsync_cuda_memory_data,               \
        .memory_nbytes = wsync_cuda_memory_nbytes,           \
        .memory_fd = wsync_cuda_memory_fd,                   \
        .memory_pin = wsync_cuda_memory_pin,                 \
        .memory_unpin = wsync_cuda_memory_unpin,             \
        .memory_park = wsync_cuda_memory_park,               \
        .memory_unpark = wsync_cuda_memory_unpark,           \
        .stream_create = stream_create_##n,                  \
        .stream_destroy = wsync_cuda_stream_destroy,         \
        .stream_copy = wsync_cuda_stream_copy,               \
        .stream_record = wsync_cuda_stream_record,           \
        .stream_wait = wsync_cuda_stream_wait,               \
        .stream_follow = wsync_cuda_stream_follow,           \
        .stream_lead = wsync_cuda_stream_lead,               \
        .stream_abandon = wsync_cuda_stream_abandon,         \
        .stream_ahead = wsync_cuda_stream_ahead,             \
        .stream_synchronize = wsync_cuda_stream_synchronize, \
        .stream_trace = wsync_cuda_stream_trace,             \
        .event_wait = wsync_cuda_event_wait,                 \
        .event_query = wsync_cuda_event_query,               \
    },
    static const wsync_device_ops_t tables[WSYNC_CUDA_MAX_DEVICES] = {ORDINAL_MAP(OPS)};
#undef OPS
    const wsync_cuda_driver_t *driver = NULL;
    const wsync_cuda_device_t *device = NULL;
    wsync_cuda_info_t info;
    int ordinal = -1;
    wsync_status_t status = wsync_cuda_driver(&driver, err);

    if (status == WSYNC_OK) {
        status = wsync_cuda_find(driver, uuid, &ordinal, &info, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_cuda_device(ordinal, &device, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_cuda_load_kernels(device, image, err);
    }
    if (status == WSYNC_OK) {
        *ops = &tables[ordinal];
    }
    return status;
}
