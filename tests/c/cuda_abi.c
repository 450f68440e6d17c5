/* SPDX-License-Identifier: Apache-2.0
 * What csrc/device/cuda_driver.h says of the driver, against the cuda.h of a toolkit:
 * .ci/driver.py compiles this file and runs nothing of it. */
#include <stddef.h>

#include <cuda.h>
#include <cudaTypedefs.h>

#include "device/cuda_driver.h"

#define SAME(ours, theirs) \
    _Static_assert((long long)(ours) == (long long)(theirs), #ours " is not " #theirs)

SAME(WSYNC_CU_SUCCESS, CUDA_SUCCESS);
SAME(WSYNC_CU_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE);
SAME(WSYNC_CU_OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY);
SAME(WSYNC_CU_NOT_INITIALIZED, CUDA_ERROR_NOT_INITIALIZED);
SAME(WSYNC_CU_DEINITIALIZED, CUDA_ERROR_DEINITIALIZED);
SAME(WSYNC_CU_STUB_LIBRARY, CUDA_ERROR_STUB_LIBRARY);
SAME(WSYNC_CU_DEVICE_UNAVAILABLE, CUDA_ERROR_DEVICE_UNAVAILABLE);
SAME(WSYNC_CU_NO_DEVICE, CUDA_ERROR_NO_DEVICE);
SAME(WSYNC_CU_INVALID_DEVICE, CUDA_ERROR_INVALID_DEVICE);
SAME(WSYNC_CU_INVALID_CONTEXT, CUDA_ERROR_INVALID_CONTEXT);
SAME(WSYNC_CU_MAP_FAILED, CUDA_ERROR_MAP_FAILED);
SAME(WSYNC_CU_OPERATING_SYSTEM, CUDA_ERROR_OPERATING_SYSTEM);
SAME(WSYNC_CU_INVALID_HANDLE, CUDA_ERROR_INVALID_HANDLE);
SAME(WSYNC_CU_ILLEGAL_STATE, CUDA_ERROR_ILLEGAL_STATE);
SAME(WSYNC_CU_NOT_FOUND, CUDA_ERROR_NOT_FOUND);
SAME(WSYNC_CU_NOT_READY, CUDA_ERROR_NOT_READY);
SAME(WSYNC_CU_ILLEGAL_ADDRESS, CUDA_ERROR_ILLEGAL_ADDRESS);
SAME(WSYNC_CU_ALREADY_REGISTERED, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
SAME(WSYNC_CU_NOT_REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
SAME(WSYNC_CU_LAUNCH_FAILED, CUDA_ERROR_LAUNCH_FAILED);
SAME(WSYNC_CU_NOT_PERMITTED, CUDA_ERROR_NOT_PERMITTED);
SAME(WSYNC_CU_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED);
SAME(WSYNC_CU_SYSTEM_NOT_READY, CUDA_ERROR_SYSTEM_NOT_READY);
SAME(WSYNC_CU_DRIVER_MISMATCH, CUDA_ERROR_SYSTEM_DRIVER_MISMATCH);
SAME(WSYNC_CU_UNKNOWN, CUDA_ERROR_UNKNOWN);

SAME(WSYNC_CU_ALLOCATION_PINNED, CU_MEM_ALLOCATION_TYPE_PINNED);
SAME(WSYNC_CU_LOCATION_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE);
SAME(WSYNC_CU_HANDLE_FD, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
SAME(WSYNC_CU_GRANULARITY_MINIMUM, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
SAME(WSYNC_CU_ACCESS_READ, CU_MEM_ACCESS_FLAGS_PROT_READ);
SAME(WSYNC_CU_ACCESS_READ_WRITE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
SAME(WSYNC_CU_IPC_LAZY_PEER_ACCESS, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
SAME(WSYNC_CU_HOST_PORTABLE, CU_MEMHOSTREGISTER_PORTABLE);
SAME(WSYNC_CU_HOST_DEVICE_MAP, CU_MEMHOSTREGISTER_DEVICEMAP);
SAME(WSYNC_CU_STREAM_NON_BLOCKING, CU_STREAM_NON_BLOCKING);
SAME(WSYNC_CU_WAIT_GEQ, CU_STREAM_WAIT_VALUE_GEQ);
SAME(WSYNC_CU_EVENT_DISABLE_TIMING, CU_EVENT_DISABLE_TIMING);
SAME(WSYNC_CU_LOOKUP_LEGACY_STREAM, CU_GET_PROC_ADDRESS_LEGACY_STREAM);
#if CUDA_VERSION >= 12080
SAME(WSYNC_CU_ATTRIBUTE_MPS, CU_DEVICE_ATTRIBUTE_MPS_ENABLED);
SAME(WSYNC_CU_COPY_ORDER_STREAM, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
SAME(WSYNC_CU_COPY_BESIDE_KERNELS, CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE);
#endif

SAME(WSYNC_CU_POINTER_TYPE, CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
SAME(WSYNC_CU_POINTER_DEVICE_ADDRESS, CU_POINTER_ATTRIBUTE_DEVICE_POINTER);
SAME(WSYNC_CU_POINTER_BUFFER, CU_POINTER_ATTRIBUTE_BUFFER_ID);
SAME(WSYNC_CU_POINTER_MANAGED, CU_POINTER_ATTRIBUTE_IS_MANAGED);
SAME(WSYNC_CU_POINTER_LEGACY_IPC, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE);
SAME(WSYNC_CU_POINTER_MAPPED, CU_POINTER_ATTRIBUTE_MAPPED);
SAME(WSYNC_CU_POINTER_HANDLE_TYPES, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES);
SAME(WSYNC_CU_MEMORY_HOST, CU_MEMORYTYPE_HOST);
SAME(WSYNC_CU_MEMORY_DEVICE, CU_MEMORYTYPE_DEVICE);

SAME(WSYNC_CU_ATTRIBUTE_PROCESSORS, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME(WSYNC_CU_ATTRIBUTE_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(WSYNC_CU_ATTRIBUTE_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME(WSYNC_CU_ATTRIBUTE_PAGEABLE, CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS);
SAME(WSYNC_CU_ATTRIBUTE_HOST_TABLES,
     CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES);
SAME(WSYNC_CU_ATTRIBUTE_HOST_REGISTER, CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED);
SAME(WSYNC_CU_ATTRIBUTE_VMM, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
SAME(WSYNC_CU_ATTRIBUTE_HANDLE_FD,
     CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
SAME(WSYNC_CU_ATTRIBUTE_STREAM_WORDS, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS);

/* A field is at the same place and as large. */
#define FIELD(type, ours, their_type, theirs)                 \
    SAME(offsetof(type, ours), offsetof(their_type, theirs)); \
    SAME(sizeof(((type *)NULL)->ours), sizeof(((their_type *)NULL)->theirs))

FIELD(wsync_cu_location_t, type, CUmemLocation, type);
FIELD(wsync_cu_location_t, id, CUmemLocation, id);
SAME(sizeof(wsync_cu_location_t), sizeof(CUmemLocation));
FIELD(wsync_cu_property_t, type, CUmemAllocationProp, type);
FIELD(wsync_cu_property_t, handle_types, CUmemAllocationProp, requestedHandleTypes);
FIELD(wsync_cu_property_t, location, CUmemAllocationProp, location);
FIELD(wsync_cu_property_t, windows_only, CUmemAllocationProp, win32HandleMetaData);
FIELD(wsync_cu_property_t, flags, CUmemAllocationProp, allocFlags);
SAME(sizeof(wsync_cu_property_t), sizeof(CUmemAllocationProp));
FIELD(wsync_cu_access_t, location, CUmemAccessDesc, location);
FIELD(wsync_cu_access_t, flags, CUmemAccessDesc, flags);
SAME(sizeof(wsync_cu_access_t), sizeof(CUmemAccessDesc));
#if CUDA_VERSION >= 12080
FIELD(wsync_cu_copy_attributes_t, source_order, CUmemcpyAttributes, srcAccessOrder);
FIELD(wsync_cu_copy_attributes_t, source_hint, CUmemcpyAttributes, srcLocHint);
FIELD(wsync_cu_copy_attributes_t, destination_hint, CUmemcpyAttributes, dstLocHint);
FIELD(wsync_cu_copy_attributes_t, flags, CUmemcpyAttributes, flags);
SAME(sizeof(wsync_cu_copy_attributes_t), sizeof(CUmemcpyAttributes));
#endif
SAME(sizeof(wsync_cu_uuid_t), sizeof(CUuuid));
SAME(sizeof(wsync_cu_ipc_t), sizeof(CUipcMemHandle));
SAME(_Alignof(wsync_cu_ipc_t), _Alignof(CUipcMemHandle));

/* Numbers of the driver's are an int each, whatever the compiler makes of its enums. */
SAME(sizeof(wsync_cu_result_t), sizeof(CUresult));
SAME(sizeof(wsync_cu_device_t), sizeof(CUdevice));
SAME(sizeof(wsync_cu_ptr_t), sizeof(CUdeviceptr));
SAME(sizeof(wsync_cu_handle_t), sizeof(CUmemGenericAllocationHandle));
SAME(sizeof(wsync_cu_attribute_t), sizeof(CUdevice_attribute));
SAME(sizeof(wsync_cu_pointer_attribute_t), sizeof(CUpointer_attribute));
SAME(sizeof(wsync_cu_granularity_t), sizeof(CUmemAllocationGranularity_flags));
SAME(sizeof(wsync_cu_handle_type_t), sizeof(CUmemAllocationHandleType));

/* The driver's headers declare each function as it was in each version: the table's
 * parameters, with the driver's types, are those of the version that it asks for. */
#define wsync_cu_result_t CUresult
#define wsync_cu_device_t CUdevice
#define wsync_cu_ptr_t CUdeviceptr
#define wsync_cu_handle_t CUmemGenericAllocationHandle
#define wsync_cu_context_t CUcontext
#define wsync_cu_stream_t CUstream
#define wsync_cu_event_t CUevent
#define wsync_cu_module_t CUmodule
#define wsync_cu_function_t CUfunction
#define wsync_cu_uuid_t CUuuid
#define wsync_cu_ipc_t CUipcMemHandle
#define wsync_cu_property_t CUmemAllocationProp
#define wsync_cu_access_t CUmemAccessDesc
#define wsync_cu_copy_attributes_t CUmemcpyAttributes
#define wsync_cu_attribute_t CUdevice_attribute
#define wsync_cu_pointer_attribute_t CUpointer_attribute
#define wsync_cu_granularity_t CUmemAllocationGranularity_flags
#define wsync_cu_handle_type_t CUmemAllocationHandleType
#define COMPARE(member, symbol, version, parameters)                              \
    _Static_assert(__builtin_types_compatible_p(PFN_##symbol##_v##version,        \
                                                wsync_cu_result_t(*) parameters), \
                   #symbol " of " #version " has other parameters");
WSYNC_CUDA_MAP(COMPARE)
#if CUDA_VERSION >= 12080
WSYNC_CUDA_LATER_MAP(COMPARE)
#endif
