/* SPDX-License-Identifier: Apache-2.0
 * The NVIDIA driver as wsync uses it: a table of entry points that is looked up at run
 * time, so that nothing links libcuda and no CUDA header is needed to build.  Types and
 * numbers are those of the driver's stable C interface. */
#ifndef WSYNC_DEVICE_CUDA_DRIVER_H
#define WSYNC_DEVICE_CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "core/base/status.h"

typedef int wsync_cu_result_t;
typedef int wsync_cu_device_t;    /* ordinal in this process */
typedef int wsync_cu_attribute_t; /* of a device */
typedef int wsync_cu_pointer_attribute_t;
typedef int wsync_cu_granularity_t;
typedef int wsync_cu_handle_type_t;
typedef unsigned long long wsync_cu_ptr_t;    /* address on the device */
typedef unsigned long long wsync_cu_handle_t; /* physical memory */
typedef struct wsync_cu_context *wsync_cu_context_t;
typedef struct wsync_cu_stream *wsync_cu_stream_t;
typedef struct wsync_cu_event *wsync_cu_event_t;
typedef struct wsync_cu_module *wsync_cu_module_t;
typedef struct wsync_cu_function *wsync_cu_function_t;

typedef struct wsync_cu_uuid {
    uint8_t bytes[16];
} wsync_cu_uuid_t;

typedef struct wsync_cu_ipc {
    char bytes[64];
} wsync_cu_ipc_t;

typedef struct wsync_cu_location {
    int type;
    int id;
} wsync_cu_location_t;

typedef struct wsync_cu_property {
    int type;
    int handle_types;
    wsync_cu_location_t location;
    void *windows_only;
    uint8_t flags[8];
} wsync_cu_property_t;

typedef struct wsync_cu_access {
    wsync_cu_location_t location;
    int flags;
} wsync_cu_access_t;

/* Of the copies of a batch. */
typedef struct wsync_cu_copy_attributes {
    int source_order; /* when a source may be read */
    wsync_cu_location_t source_hint;
    wsync_cu_location_t destination_hint;
    unsigned flags;
} wsync_cu_copy_attributes_t;

enum {
    WSYNC_CU_SUCCESS = 0,
    WSYNC_CU_INVALID_VALUE = 1,
    WSYNC_CU_OUT_OF_MEMORY = 2,
    WSYNC_CU_NOT_INITIALIZED = 3,
    WSYNC_CU_DEINITIALIZED = 4,
    WSYNC_CU_STUB_LIBRARY = 34,
    WSYNC_CU_DEVICE_UNAVAILABLE = 46,
    WSYNC_CU_NO_DEVICE = 100,
    WSYNC_CU_INVALID_DEVICE = 101,
    WSYNC_CU_INVALID_CONTEXT = 201,
    WSYNC_CU_MAP_FAILED = 205,
    WSYNC_CU_OPERATING_SYSTEM = 304,
    WSYNC_CU_INVALID_HANDLE = 400,
    WSYNC_CU_ILLEGAL_STATE = 401,
    WSYNC_CU_NOT_FOUND = 500,
    WSYNC_CU_NOT_READY = 600,
    WSYNC_CU_ILLEGAL_ADDRESS = 700,
    WSYNC_CU_ALREADY_REGISTERED = 712,
    WSYNC_CU_NOT_REGISTERED = 713,
    WSYNC_CU_LAUNCH_FAILED = 719,
    WSYNC_CU_NOT_PERMITTED = 800,
    WSYNC_CU_NOT_SUPPORTED = 801,
    WSYNC_CU_SYSTEM_NOT_READY = 802,
    WSYNC_CU_DRIVER_MISMATCH = 803,
    WSYNC_CU_UNKNOWN = 999,
};

enum {
    WSYNC_CU_ALLOCATION_PINNED = 1,
    WSYNC_CU_LOCATION_DEVICE = 1,
    WSYNC_CU_HANDLE_FD = 1,
    WSYNC_CU_GRANULARITY_MINIMUM = 0,
    WSYNC_CU_ACCESS_READ = 1,
    WSYNC_CU_ACCESS_READ_WRITE = 3,
    WSYNC_CU_IPC_LAZY_PEER_ACCESS = 1,
    WSYNC_CU_HOST_PORTABLE = 1,
    WSYNC_CU_HOST_DEVICE_MAP = 2,
    WSYNC_CU_STREAM_NON_BLOCKING = 1,
    WSYNC_CU_WAIT_GEQ = 0,
    WSYNC_CU_EVENT_DISABLE_TIMING = 2,
    WSYNC_CU_COPY_ORDER_STREAM = 1,
    WSYNC_CU_COPY_BESIDE_KERNELS = 1, /* by copy engines, where that can be chosen */
    /* Streams mean what they mean in programs that do not ask for one default stream a
     * thread. */
    WSYNC_CU_LOOKUP_LEGACY_STREAM = 1,
};

/* Attributes of an address: an unsigned, a wsync_cu_ptr_t, an unsigned long long, three
 * bool, an unsigned long long. */
enum {
    WSYNC_CU_POINTER_TYPE = 2,
    WSYNC_CU_POINTER_DEVICE_ADDRESS = 3,
    WSYNC_CU_POINTER_BUFFER = 7, /* one number per allocation of the process; 0: none */
    WSYNC_CU_POINTER_MANAGED = 8,
    WSYNC_CU_POINTER_LEGACY_IPC = 10, /* cuIpcGetMemHandle takes the allocation */
    WSYNC_CU_POINTER_MAPPED = 13, /* memory lies there, not the reserved address alone */
    WSYNC_CU_POINTER_HANDLE_TYPES = 14, /* a bit mask of what cuMemExport... makes of it */

    WSYNC_CU_MEMORY_HOST = 1, /* types */
    WSYNC_CU_MEMORY_DEVICE = 2,
};

/* Attributes of a device. */
enum {
    WSYNC_CU_ATTRIBUTE_PROCESSORS = 16,
    WSYNC_CU_ATTRIBUTE_MAJOR = 75,
    WSYNC_CU_ATTRIBUTE_MINOR = 76,
    WSYNC_CU_ATTRIBUTE_PAGEABLE = 88,     /* it reads and writes what malloc gave */
    WSYNC_CU_ATTRIBUTE_HOST_TABLES = 100, /* and does so where that lies, moving nothing */
    WSYNC_CU_ATTRIBUTE_HOST_REGISTER = 99,
    WSYNC_CU_ATTRIBUTE_VMM = 102,
    WSYNC_CU_ATTRIBUTE_HANDLE_FD = 103,
    WSYNC_CU_ATTRIBUTE_STREAM_WORDS = 122, /* 64-bit stream memory operations */
    WSYNC_CU_ATTRIBUTE_MPS = 133, /* contexts are a server's; older drivers do not say */
};

/* Member, symbol, the version of the interface that the parameters are of, parameters. */
#define WSYNC_CUDA_MAP(X)                                                                  \
    X(init, cuInit, 2000, (unsigned flags))                                                \
    X(driver_get_version, cuDriverGetVersion, 2020, (int *version))                        \
    X(get_error_name, cuGetErrorName, 6000, (wsync_cu_result_t code, const char **text))   \
    X(get_error_string, cuGetErrorString, 6000,                                            \
      (wsync_cu_result_t code, const char **text))                                         \
    X(device_get_count, cuDeviceGetCount, 2000, (int *count))                              \
    X(device_get, cuDeviceGet, 2000, (wsync_cu_device_t * device, int ordinal))            \
    X(device_get_name, cuDeviceGetName, 2000,                                              \
      (char *name, int nbytes, wsync_cu_device_t device))                                  \
    X(device_get_uuid, cuDeviceGetUuid, 11040,                                             \
      (wsync_cu_uuid_t * uuid, wsync_cu_device_t device))                                  \
    X(device_get_attribute, cuDeviceGetAttribute, 2000,                                    \
      (int *value, wsync_cu_attribute_t attribute, wsync_cu_device_t device))              \
    X(device_can_access, cuDeviceCanAccessPeer, 4000,                                      \
      (int *can, wsync_cu_device_t device, wsync_cu_device_t peer))                        \
    X(device_total_mem, cuDeviceTotalMem, 3020,                                            \
      (size_t *nbytes, wsync_cu_device_t device))                                          \
    X(primary_retain, cuDevicePrimaryCtxRetain, 7000,                                      \
      (wsync_cu_context_t * context, wsync_cu_device_t device))                            \
    X(context_push, cuCtxPushCurrent, 4000, (wsync_cu_context_t context))                  \
    X(context_pop, cuCtxPopCurrent, 4000, (wsync_cu_context_t * context))                  \
    X(context_synchronize, cuCtxSynchronize, 2000, (void))                                 \
    X(mem_get_info, cuMemGetInfo, 3020, (size_t *free, size_t *total))                     \
    X(mem_granularity, cuMemGetAllocationGranularity, 10020,                               \
      (size_t *nbytes, const wsync_cu_property_t *property,                                \
       wsync_cu_granularity_t option))                                                     \
    X(mem_properties, cuMemGetAllocationPropertiesFromHandle, 10020,                       \
      (wsync_cu_property_t * property, wsync_cu_handle_t handle))                          \
    X(mem_create, cuMemCreate, 10020,                                                      \
      (wsync_cu_handle_t * handle, size_t nbytes, const wsync_cu_property_t *property,     \
       unsigned long long flags))                                                          \
    X(mem_release, cuMemRelease, 10020, (wsync_cu_handle_t handle))                        \
    X(mem_reserve, cuMemAddressReserve, 10020,                                             \
      (wsync_cu_ptr_t * at, size_t nbytes, size_t alignment, wsync_cu_ptr_t wanted,        \
       unsigned long long flags))                                                          \
    X(mem_unreserve, cuMemAddressFree, 10020, (wsync_cu_ptr_t at, size_t nbytes))          \
    X(mem_map, cuMemMap, 10020,                                                            \
      (wsync_cu_ptr_t at, size_t nbytes, size_t offset, wsync_cu_handle_t handle,          \
       unsigned long long flags))                                                          \
    X(mem_unmap, cuMemUnmap, 10020, (wsync_cu_ptr_t at, size_t nbytes))                    \
    X(mem_set_access, cuMemSetAccess, 10020,                                               \
      (wsync_cu_ptr_t at, size_t nbytes, const wsync_cu_access_t *access, size_t count))   \
    X(mem_export, cuMemExportToShareableHandle, 10020,                                     \
      (void *shareable, wsync_cu_handle_t handle, wsync_cu_handle_type_t type,             \
       unsigned long long flags))                                                          \
    X(mem_import, cuMemImportFromShareableHandle, 10020,                                   \
      (wsync_cu_handle_t * handle, void *shareable, wsync_cu_handle_type_t type))          \
    X(mem_retain, cuMemRetainAllocationHandle, 11000,                                      \
      (wsync_cu_handle_t * handle, void *at))                                              \
    X(mem_alloc, cuMemAlloc, 3020, (wsync_cu_ptr_t * at, size_t nbytes))                   \
    X(mem_free, cuMemFree, 3020, (wsync_cu_ptr_t at))                                      \
    X(mem_range, cuMemGetAddressRange, 3020,                                               \
      (wsync_cu_ptr_t * base, size_t *nbytes, wsync_cu_ptr_t at))                          \
    X(ipc_get_memory, cuIpcGetMemHandle, 4010,                                             \
      (wsync_cu_ipc_t * handle, wsync_cu_ptr_t at))                                        \
    X(ipc_open_memory, cuIpcOpenMemHandle, 11000,                                          \
      (wsync_cu_ptr_t * at, wsync_cu_ipc_t handle, unsigned flags))                        \
    X(ipc_close_memory, cuIpcCloseMemHandle, 4010, (wsync_cu_ptr_t at))                    \
    X(host_register, cuMemHostRegister, 6050, (void *data, size_t nbytes, unsigned flags)) \
    X(host_unregister, cuMemHostUnregister, 4000, (void *data))                            \
    X(host_pointer, cuMemHostGetDevicePointer, 3020,                                       \
      (wsync_cu_ptr_t * at, void *data, unsigned flags))                                   \
    X(pointer_attributes, cuPointerGetAttributes, 7000,                                    \
      (unsigned count, wsync_cu_pointer_attribute_t *attributes, void **values,            \
       wsync_cu_ptr_t at))                                                                 \
    X(stream_create, cuStreamCreate, 2000, (wsync_cu_stream_t * stream, unsigned flags))   \
    X(stream_create_with_priority, cuStreamCreateWithPriority, 5050,                       \
      (wsync_cu_stream_t * stream, unsigned flags, int priority))                          \
    X(context_priorities, cuCtxGetStreamPriorityRange, 5050, (int *least, int *greatest))  \
    X(stream_destroy, cuStreamDestroy, 4000, (wsync_cu_stream_t stream))                   \
    X(stream_query, cuStreamQuery, 2000, (wsync_cu_stream_t stream))                       \
    X(stream_synchronize, cuStreamSynchronize, 2000, (wsync_cu_stream_t stream))           \
    X(stream_wait_value, cuStreamWaitValue64, 11070,                                       \
      (wsync_cu_stream_t stream, wsync_cu_ptr_t at, uint64_t value, unsigned flags))       \
    X(stream_write_value, cuStreamWriteValue64, 11070,                                     \
      (wsync_cu_stream_t stream, wsync_cu_ptr_t at, uint64_t value, unsigned flags))       \
    X(event_create, cuEventCreate, 2000, (wsync_cu_event_t * event, unsigned flags))       \
    X(event_destroy, cuEventDestroy, 4000, (wsync_cu_event_t event))                       \
    X(event_record, cuEventRecord, 2000,                                                   \
      (wsync_cu_event_t event, wsync_cu_stream_t stream))                                  \
    X(event_query, cuEventQuery, 2000, (wsync_cu_event_t event))                           \
    X(event_elapsed, cuEventElapsedTime, 2000,                                             \
      (float *ms, wsync_cu_event_t begin, wsync_cu_event_t end))                           \
    X(memcpy_async, cuMemcpyAsync, 4000,                                                   \
      (wsync_cu_ptr_t destination, wsync_cu_ptr_t source, size_t nbytes,                   \
       wsync_cu_stream_t stream))                                                          \
    X(memcpy_in_async, cuMemcpyHtoDAsync, 3020,                                            \
      (wsync_cu_ptr_t destination, const void *source, size_t nbytes,                      \
       wsync_cu_stream_t stream))                                                          \
    X(memset_async, cuMemsetD8Async, 3020,                                                 \
      (wsync_cu_ptr_t at, unsigned char value, size_t nbytes, wsync_cu_stream_t stream))   \
    X(module_load, cuModuleLoadData, 2000,                                                 \
      (wsync_cu_module_t * module, const void *image))                                     \
    X(module_unload, cuModuleUnload, 2000, (wsync_cu_module_t module))                     \
    X(module_function, cuModuleGetFunction, 2000,                                          \
      (wsync_cu_function_t * function, wsync_cu_module_t module, const char *name))        \
    X(occupancy, cuOccupancyMaxActiveBlocksPerMultiprocessor, 6050,                        \
      (int *blocks, wsync_cu_function_t function, int threads, size_t shared_nbytes))      \
    X(launch_kernel, cuLaunchKernel, 4000,                                                 \
      (wsync_cu_function_t function, unsigned grid_x, unsigned grid_y, unsigned grid_z,    \
       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_nbytes,       \
       wsync_cu_stream_t stream, void **parameters, void **extra))

/* The same of functions that older drivers lack: NULL there. */
#define WSYNC_CUDA_LATER_MAP(X)                                                        \
    X(memcpy_batch_async, cuMemcpyBatchAsync, 12080,                                   \
      (wsync_cu_ptr_t * destinations, wsync_cu_ptr_t * sources, size_t *sizes,         \
       size_t count, wsync_cu_copy_attributes_t *attributes, size_t *attribute_starts, \
       size_t attribute_count, size_t *failed, wsync_cu_stream_t stream))

typedef struct wsync_cuda_driver {
#define WSYNC_CUDA_MEMBER(member, symbol, version, parameters) \
    wsync_cu_result_t(*member) parameters; /* NOLINT(bugprone-macro-parentheses) */
    WSYNC_CUDA_MAP(WSYNC_CUDA_MEMBER)
    WSYNC_CUDA_LATER_MAP(WSYNC_CUDA_MEMBER)
#undef WSYNC_CUDA_MEMBER
    int version; /* of CUDA that the driver speaks: 12080 is 12.8 */
    int device_count;
    pid_t pid;           /* of the process that initialised it */
    uint64_t process[2]; /* that no other process has; 0 if the kernel gave none */
} wsync_cuda_driver_t;

enum { WSYNC_CUDA_MIN_VERSION = 12000 };

/* The driver, loaded and initialised by the first call: libcuda.so.1, or what
 * WSYNC_CUDA_LIB names.  UNSUPPORTED says in words why there is no GPU to use, STATE that
 * this process is a fork of the one that initialised the driver.  The answer stays the same
 * for the life of the process. */
wsync_status_t wsync_cuda_driver(const wsync_cuda_driver_t **driver, wsync_error_t *err);

/* STATE in a fork of the process that initialised the driver. */
wsync_status_t wsync_cuda_check_process(const wsync_cuda_driver_t *driver,
                                        wsync_error_t *err);

/* OK if the call has succeeded; else NO_MEMORY, UNSUPPORTED or DEVICE, by the code, with
 * what was attempted (a format), the call and the driver's own words. */
wsync_status_t wsync_cuda_check(const wsync_cuda_driver_t *driver, wsync_cu_result_t code,
                                const char *call, wsync_error_t *err, const char *format,
                                ...) __attribute__((format(printf, 5, 6)));

enum { WSYNC_CUDA_NAME_NBYTES = 96, WSYNC_CUDA_UUID_NBYTES = 16 };

typedef struct wsync_cuda_info {
    char name[WSYNC_CUDA_NAME_NBYTES];
    wsync_cu_uuid_t uuid; /* of a MIG slice, its own */
    uint64_t nbytes;
    int major; /* compute capability */
    int minor;
} wsync_cuda_info_t;

/* The GPU with this UUID.  UNSUPPORTED: this process sees none such. */
wsync_status_t wsync_cuda_find(const wsync_cuda_driver_t *driver,
                               const wsync_cu_uuid_t *uuid, int *ordinal,
                               wsync_cuda_info_t *info, wsync_error_t *err);

/* What a device is; makes no context. */
wsync_status_t wsync_cuda_describe(const wsync_cuda_driver_t *driver, int ordinal,
                                   wsync_cuda_info_t *info, wsync_error_t *err);

#endif
