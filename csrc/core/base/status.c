/* SPDX-License-Identifier: Apache-2.0 */
#include "core/base/status.h"

#include <stdarg.h>
#include <stdio.h>

const char *wsync_status_text(wsync_status_t status)
{
    switch (status) {
    case WSYNC_OK:
        return "ok";
#define WSYNC_STATUS_TEXT(name, value, text, cls, base) \
    case WSYNC_ERR_##name:                              \
        return text;
        WSYNC_STATUS_MAP(WSYNC_STATUS_TEXT)
#undef WSYNC_STATUS_TEXT
    }
    return "unknown status";
}

wsync_status_t wsync_fail(wsync_error_t *err, wsync_status_t status, int native,
                          const char *origin, const char *format, ...)
{
    va_list arguments;

    if (err == NULL) {
        return status;
    }
    err->status = status;
    err->native = native;
    err->origin = origin;
    va_start(arguments, format);
    (void)vsnprintf(err->message, sizeof(err->message), format, arguments);
    va_end(arguments);
    return status;
}

wsync_status_t wsync_no_memory(wsync_error_t *err, const char *origin)
{
    return wsync_fail(err, WSYNC_ERR_NO_MEMORY, 0, origin, "no memory");
}
