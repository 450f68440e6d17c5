/* SPDX-License-Identifier: Apache-2.0
 * NCCL as wsync uses it: a table of entry points that is looked up at run time, so that
 * nothing links libnccl and its header is not needed to build.  Types and numbers are those
 * of nccl.h, with which .ci/nccl.py compares them. */
#ifndef WSYNC_COMM_NCCL_LIBRARY_H
#define WSYNC_COMM_NCCL_LIBRARY_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/status.h"
#include "device/cuda_driver.h"

typedef int wsync_nccl_result_t;
typedef int wsync_nccl_type_t; /* of elements */
typedef struct wsync_nccl_comm *wsync_nccl_comm_t;

typedef struct wsync_nccl_id {
    char bytes[128];
} wsync_nccl_id_t;

enum {
    WSYNC_NCCL_SUCCESS = 0,
    WSYNC_NCCL_CUDA_ERROR = 1,
    WSYNC_NCCL_SYSTEM_ERROR = 2,
    WSYNC_NCCL_INTERNAL_ERROR = 3,
    WSYNC_NCCL_INVALID_ARGUMENT = 4,
    WSYNC_NCCL_INVALID_USAGE = 5,
    WSYNC_NCCL_REMOTE_ERROR = 6, /* a peer is gone, or the network to it */
    WSYNC_NCCL_IN_PROGRESS = 7,  /* of a non-blocking communicator: ask again */
};

enum {
    WSYNC_NCCL_UINT8 = 1,
    WSYNC_NCCL_UNDEFINED = INT_MIN, /* a field that NCCL chooses */
};

/* As of 2.18.  Later versions have more fields at the end; how many there are here is said
 * by `nbytes` and `version`. */
typedef struct wsync_nccl_config {
    size_t nbytes;
    unsigned magic;
    unsigned version;
    int blocking;
    int cluster_size;
    int min_ctas;
    int max_ctas;
    const char *network;
    int split_share;
    /* Padding in 2.18, which 2.25 gave a meaning. */
    int traffic_class;
} wsync_nccl_config_t;

enum { WSYNC_NCCL_MIN_VERSION = 21800 }; /* 2.18.0 */

#define WSYNC_NCCL_CONFIG_MAGIC 0xcafebeefU

/* A configuration in which NCCL chooses everything but that calls do not block. */
#define WSYNC_NCCL_CONFIG_INIT              \
    {.nbytes = sizeof(wsync_nccl_config_t), \
     .magic = WSYNC_NCCL_CONFIG_MAGIC,      \
     .version = WSYNC_NCCL_MIN_VERSION,     \
     .cluster_size = WSYNC_NCCL_UNDEFINED,  \
     .min_ctas = WSYNC_NCCL_UNDEFINED,      \
     .max_ctas = WSYNC_NCCL_UNDEFINED,      \
     .split_share = WSYNC_NCCL_UNDEFINED,   \
     .traffic_class = WSYNC_NCCL_UNDEFINED}

/* Result, member, symbol, the version that brought it, parameters. */
#define WSYNC_NCCL_MAP(X)                                                                  \
    X(wsync_nccl_result_t, get_version, ncclGetVersion, 20000, (int *version))             \
    X(const char *, get_error_string, ncclGetErrorString, 20000,                           \
      (wsync_nccl_result_t result))                                                        \
    X(const char *, get_last_error, ncclGetLastError, 21300, (wsync_nccl_comm_t comm))     \
    X(wsync_nccl_result_t, get_unique_id, ncclGetUniqueId, 20000, (wsync_nccl_id_t * id))  \
    X(wsync_nccl_result_t, comm_init, ncclCommInitRankConfig, 21400,                       \
      (wsync_nccl_comm_t * comm, int rank_count, wsync_nccl_id_t id, int rank,             \
       wsync_nccl_config_t *config))                                                       \
    X(wsync_nccl_result_t, comm_get_async_error, ncclCommGetAsyncError, 20400,             \
      (wsync_nccl_comm_t comm, wsync_nccl_result_t * result))                              \
    X(wsync_nccl_result_t, comm_abort, ncclCommAbort, 20400, (wsync_nccl_comm_t comm))     \
    X(wsync_nccl_result_t, group_start, ncclGroupStart, 20000, (void))                     \
    X(wsync_nccl_result_t, group_end, ncclGroupEnd, 20000, (void))                         \
    X(wsync_nccl_result_t, send, ncclSend, 20700,                                          \
      (const void *data, size_t count, wsync_nccl_type_t type, int peer,                   \
       wsync_nccl_comm_t comm, wsync_cu_stream_t stream))                                  \
    X(wsync_nccl_result_t, recv, ncclRecv, 20700,                                          \
      (void *data, size_t count, wsync_nccl_type_t type, int peer, wsync_nccl_comm_t comm, \
       wsync_cu_stream_t stream))                                                          \
    X(wsync_nccl_result_t, broadcast, ncclBroadcast, 20200,                                \
      (const void *source, void *destination, size_t count, wsync_nccl_type_t type,        \
       int root, wsync_nccl_comm_t comm, wsync_cu_stream_t stream))

typedef struct wsync_nccl_library {
#define WSYNC_NCCL_MEMBER(result, member, symbol, since, parameters) \
    result(*member) parameters; /* NOLINT(bugprone-macro-parentheses) */
    WSYNC_NCCL_MAP(WSYNC_NCCL_MEMBER)
#undef WSYNC_NCCL_MEMBER
    int version;      /* 22809 is 2.28.9 */
    const char *path; /* of the file; lives as long as the process */
} wsync_nccl_library_t;

/* The library: what WSYNC_NCCL_LIB names; else the one that the process has loaded (torch's
 * own); else the first of these paths that loads (the wheels'); else the system's.
 * UNSUPPORTED says in words what was tried and why it is not to be used.  What one call has
 * found stays for the life of the process, and later calls get it whatever they name;
 * what was not found is looked for again. */
wsync_status_t wsync_nccl_library(const char *const *paths, size_t path_count,
                                  const wsync_nccl_library_t **library, wsync_error_t *err);

/* OK if the call has succeeded; else CLOSED (a peer is gone) or DEVICE, by the result, with
 * what was attempted (a format), the call, NCCL's words for the result and for the last
 * error of this process.  IN_PROGRESS is a failure here. */
wsync_status_t wsync_nccl_check(const wsync_nccl_library_t *library,
                                wsync_nccl_result_t result, const char *call,
                                wsync_error_t *err, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

#endif
