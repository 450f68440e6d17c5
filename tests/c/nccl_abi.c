/* SPDX-License-Identifier: Apache-2.0
 * What csrc/comm/nccl_library.h says of NCCL, against the nccl.h of a release: .ci/nccl.py
 * compiles this file and runs nothing of it. */
#include <nccl.h>

#include "comm/nccl_library.h"

#define SAME(ours, theirs) \
    _Static_assert((long long)(ours) == (long long)(theirs), #ours " is not " #theirs)

SAME(WSYNC_NCCL_SUCCESS, ncclSuccess);
SAME(WSYNC_NCCL_CUDA_ERROR, ncclUnhandledCudaError);
SAME(WSYNC_NCCL_SYSTEM_ERROR, ncclSystemError);
SAME(WSYNC_NCCL_INTERNAL_ERROR, ncclInternalError);
SAME(WSYNC_NCCL_INVALID_ARGUMENT, ncclInvalidArgument);
SAME(WSYNC_NCCL_INVALID_USAGE, ncclInvalidUsage);
SAME(WSYNC_NCCL_REMOTE_ERROR, ncclRemoteError);
SAME(WSYNC_NCCL_IN_PROGRESS, ncclInProgress);
SAME(WSYNC_NCCL_UINT8, ncclUint8);
SAME(WSYNC_NCCL_UNDEFINED, NCCL_CONFIG_UNDEF_INT);
SAME(WSYNC_NCCL_MIN_VERSION, NCCL_VERSION(2, 18, 0));
SAME(sizeof(wsync_nccl_result_t), sizeof(ncclResult_t));
SAME(sizeof(wsync_nccl_type_t), sizeof(ncclDataType_t));
SAME(sizeof(wsync_nccl_id_t), sizeof(ncclUniqueId));
SAME(_Alignof(wsync_nccl_id_t), _Alignof(ncclUniqueId));

/* A field is at the same place and of the same type. */
#define FIELD(ours, theirs)                                                        \
    SAME(offsetof(wsync_nccl_config_t, ours), offsetof(ncclConfig_t, theirs));     \
    _Static_assert(                                                                \
        __builtin_types_compatible_p(__typeof__(((wsync_nccl_config_t *)0)->ours), \
                                     __typeof__(((ncclConfig_t *)0)->theirs)),     \
        #ours " has another type than " #theirs)

FIELD(nbytes, size);
FIELD(magic, magic);
FIELD(version, version);
FIELD(blocking, blocking);
FIELD(cluster_size, cgaClusterSize);
FIELD(min_ctas, minCTAs);
FIELD(max_ctas, maxCTAs);
FIELD(network, netName);
FIELD(split_share, splitShare);
FIELD(traffic_class, trafficClass);
SAME(sizeof(wsync_nccl_config_t), offsetof(ncclConfig_t, commName));

/* Functions are declared once more, as the table has them and with NCCL's types. */
#define wsync_nccl_result_t ncclResult_t
#define wsync_nccl_type_t ncclDataType_t
#define wsync_nccl_comm_t ncclComm_t
#define wsync_nccl_id_t ncclUniqueId
#define wsync_nccl_config_t ncclConfig_t
#define wsync_cu_stream_t cudaStream_t
#define DECLARE(result, member, symbol, since, parameters) result symbol parameters;
WSYNC_NCCL_MAP(DECLARE)
