/* SPDX-License-Identifier: Apache-2.0
 * Status codes and the caller-owned error record that every fallible function fills. */
#ifndef WSYNC_CORE_BASE_STATUS_H
#define WSYNC_CORE_BASE_STATUS_H

/*  C name, value, text, Python class, built-in base class  */
#define WSYNC_STATUS_MAP(X)                                                    \
    X(NO_MEMORY, -1, "out of memory", NoMemoryError, MemoryError)              \
    X(INVALID, -2, "invalid argument", InvalidArgumentError, ValueError)       \
    X(LAYOUT, -3, "layouts do not fit together", LayoutError, ValueError)      \
    X(UNSUPPORTED, -4, "not supported", UnsupportedError, NotImplementedError) \
    X(STATE, -5, "called in the wrong state", StateError, RuntimeError)        \
    X(TIMEOUT, -6, "deadline passed", DeadlineError, TimeoutError)             \
    X(CLOSED, -7, "peer is gone", PeerClosedError, ConnectionError)            \
    X(PROTOCOL, -8, "malformed message", ProtocolError, ValueError)            \
    X(REFUSED, -9, "peer refused", PeerRefusedError, PermissionError)          \
    X(REMOTE, -10, "another process failed", RemoteError, RuntimeError)        \
    X(OS, -11, "system call failed", SystemCallError, OSError)                 \
    X(DEVICE, -12, "the GPU driver failed", DeviceError, RuntimeError)

typedef enum wsync_status {
    WSYNC_OK = 0,
#define WSYNC_STATUS_ENUM(name, value, text, cls, base) WSYNC_ERR_##name = (value),
    WSYNC_STATUS_MAP(WSYNC_STATUS_ENUM)
#undef WSYNC_STATUS_ENUM
} wsync_status_t;

enum { WSYNC_ERROR_MESSAGE_NBYTES = 768 };

typedef struct wsync_error {
    wsync_status_t status;
    int native;         /* errno, CUresult or ncclResult_t; 0 if none */
    const char *origin; /* static string: the call or module that decided the error */
    char message[WSYNC_ERROR_MESSAGE_NBYTES];
} wsync_error_t;

/* Static text of a code; "unknown status" for a value outside the table. */
const char *wsync_status_text(wsync_status_t status);

/* Fills *err (NULL allowed) and returns `status`, so that a function can fail in one
 * statement.  `origin` is a static string; the message is truncated to fit. */
wsync_status_t wsync_fail(wsync_error_t *err, wsync_status_t status, int native,
                          const char *origin, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
/* The same of a small allocation that has failed. */
wsync_status_t wsync_no_memory(wsync_error_t *err, const char *origin);

#endif
