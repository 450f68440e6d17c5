/* SPDX-License-Identifier: Apache-2.0
 * Misuse, what is injected, the census. */
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../fakecuda/fake_calls.h"
#include "fake_nccl.h"

enum { DEFAULT_VERSION = 22907 };

fake_settings_t fake_settings = {.hang = -1, .fails = -1};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int misuse_fd = -1;

/* What ncclGetLastError says. */
static struct {
    pthread_mutex_t mutex;
    char text[FAKE_TEXT_NBYTES];
} last = {.mutex = PTHREAD_MUTEX_INITIALIZER};

EXPORT void fakenccl_census(fakenccl_census_t *census);
EXPORT void fakenccl_inject(const char *what, long k, long value);
EXPORT int ncclGetVersion(int *version);
EXPORT const char *ncclGetErrorString(int result);
EXPORT const char *ncclGetLastError(wsync_nccl_comm_t comm);

void fake_lock(void)
{
    (void)pthread_mutex_lock(&mutex);
}

void fake_unlock(void)
{
    (void)pthread_mutex_unlock(&mutex);
}

long fake_thread(void)
{
    return (long)syscall(SYS_gettid);
}

/* --- lines -----------------------------------------------------------------------------
 */

int fake_refuse(int result, const char *format, ...)
{
    char text[FAKE_TEXT_NBYTES];
    va_list arguments;

    va_start(arguments, format);
    (void)vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    (void)pthread_mutex_lock(&last.mutex);
    memcpy(last.text, text, sizeof(text));
    (void)pthread_mutex_unlock(&last.mutex);
    return result;
}

int fake_misuse(int result, const char *format, ...)
{
    char text[FAKE_TEXT_NBYTES];
    va_list arguments;

    va_start(arguments, format);
    (void)vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    fake_write_line(misuse_fd, text);
    return fake_refuse(result, "%s", text);
}

/* --- what is injected -------------------------------------------------------------------
 */

void fakenccl_inject(const char *what, long k, long value)
{
    fake_settings_t *settings = &fake_settings;

    if (strcmp(what, "hang") == 0) {
        atomic_store(&settings->hang, k);
    } else if (strcmp(what, "error") == 0) {
        atomic_store(&settings->error, (int)value);
        atomic_store(&settings->fails, k);
    } else if (strcmp(what, "never") == 0) {
        atomic_store(&settings->never, k >= 0);
    } else if (strcmp(what, "owner") == 0) {
        atomic_store(&settings->owner, k >= 0);
    } else {
        (void)fprintf(stderr, "fakenccl: nothing to inject is called %s\n", what);
        abort();
    }
}

__attribute__((constructor)) static void read_environment(void)
{
    misuse_fd = fake_open_log("WSYNC_FAKE_CUDA_MISUSE");
    atomic_store(&fake_settings.version,
                 (int)fake_read_number("WSYNC_FAKE_NCCL_VERSION", DEFAULT_VERSION));
}

/* --- the census -------------------------------------------------------------------------
 */

void fakenccl_census(fakenccl_census_t *census)
{
    fake_lock();
    *census = (fakenccl_census_t){.communicators = fake_communicators(),
                                  .works = fake_works(),
                                  .received = fake_received(),
                                  .operations = fake_operations()};
    fake_unlock();
}

/* --- what NCCL says of itself -----------------------------------------------------------
 */

int ncclGetVersion(int *version)
{
    *version = atomic_load(&fake_settings.version);
    return WSYNC_NCCL_SUCCESS;
}

const char *ncclGetErrorString(int result)
{
    static const char *const words[] = {
        "no error",
        "unhandled cuda error",
        "unhandled system error",
        "internal error",
        "invalid argument",
        "invalid usage",
        "remote process exited or there was a network error",
        "NCCL operation in progress",
    };

    return result >= 0 && result <= WSYNC_NCCL_IN_PROGRESS ? words[result]
                                                           : "unknown result code";
}

const char *ncclGetLastError(wsync_nccl_comm_t comm)
{
    static _Thread_local char text[FAKE_TEXT_NBYTES];

    (void)comm;
    (void)pthread_mutex_lock(&last.mutex);
    memcpy(text, last.text, sizeof(text));
    (void)pthread_mutex_unlock(&last.mutex);
    return text;
}
