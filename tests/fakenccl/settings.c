/* SPDX-License-Identifier: Apache-2.0
 * The log, planned failures, what is injected, the census. */
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

enum { DEFAULT_VERSION = 22907, DEFAULT_POLLS = 2 };

fake_settings_t fake_settings = {
    .polls = DEFAULT_POLLS, .hang = -1, .die = -1, .fails = -1};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int log_fd = -1;
static int misuse_fd = -1;

static fake_failure_t failure = FAKE_FAILURE_INIT;

/* What ncclGetLastError says. */
static struct {
    pthread_mutex_t mutex;
    char text[FAKE_TEXT_NBYTES];
} last = {.mutex = PTHREAD_MUTEX_INITIALIZER};

EXPORT void fakenccl_census(fakenccl_census_t *census);
EXPORT void fakenccl_fail(const char *call, long k, int result);
EXPORT const char *fakenccl_failed(void);
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

void fake_log(const char *format, ...)
{
    char prefix[FAKE_NAME_NBYTES];
    va_list arguments;

    (void)snprintf(prefix, sizeof(prefix), "%ld %ld", (long)getpid(), fake_thread());
    va_start(arguments, format);
    fake_write_line(log_fd, prefix, format, arguments);
    va_end(arguments);
}

int fake_refuse(int result, const char *format, ...)
{
    char text[FAKE_TEXT_NBYTES];
    va_list arguments;

    va_start(arguments, format);
    (void)vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    fake_log("refused %d: %s", result, text);
    (void)pthread_mutex_lock(&last.mutex);
    memcpy(last.text, text, sizeof(text));
    (void)pthread_mutex_unlock(&last.mutex);
    return result;
}

int fake_misuse(int result, const char *format, ...)
{
    char prefix[FAKE_NAME_NBYTES];
    char text[FAKE_TEXT_NBYTES];
    va_list arguments;

    va_start(arguments, format);
    (void)vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    (void)snprintf(prefix, sizeof(prefix), "%ld", (long)getpid());
    va_start(arguments, format);
    fake_write_line(misuse_fd, prefix, format, arguments);
    va_end(arguments);
    return fake_refuse(result, "%s", text);
}

/* --- planned failures and what is injected ----------------------------------------------
 */

void fakenccl_fail(const char *call, long k, int result)
{
    fake_failure_plan(&failure, call, k, result, false);
}

const char *fakenccl_failed(void)
{
    return fake_failure_hit(&failure);
}

void fakenccl_inject(const char *what, long k, long value)
{
    fake_settings_t *settings = &fake_settings;

    if (strcmp(what, "hang") == 0) {
        atomic_store(&settings->hang, k);
    } else if (strcmp(what, "error") == 0) {
        atomic_store(&settings->error, (int)value);
        atomic_store(&settings->fails, k);
    } else if (strcmp(what, "die") == 0) {
        atomic_store(&settings->die, k);
    } else if (strcmp(what, "never") == 0) {
        atomic_store(&settings->never, k >= 0);
    } else if (strcmp(what, "owner") == 0) {
        atomic_store(&settings->owner, k >= 0);
    } else if (strcmp(what, "slow") == 0) {
        atomic_store(&settings->slow_us, k >= 0 ? value : 0);
    } else if (strcmp(what, "polls") == 0) {
        atomic_store(&settings->polls, k >= 0 ? value : DEFAULT_POLLS);
    } else {
        (void)fprintf(stderr, "fakenccl: nothing to inject is called %s\n", what);
        abort();
    }
}

static void read_environment(void)
{
    log_fd = fake_open_log("WSYNC_FAKE_NCCL_LOG");
    misuse_fd = fake_open_log("WSYNC_FAKE_CUDA_MISUSE");
    atomic_store(&fake_settings.version,
                 (int)fake_read_number("WSYNC_FAKE_NCCL_VERSION", DEFAULT_VERSION));
}

int fake_begin(const char *call)
{
    bool lasts;
    int result;

    (void)pthread_once(&once, read_environment);
    fake_log("%s", call);
    result = fake_failure_strike(&failure, call, &lasts);
    return result == WSYNC_NCCL_SUCCESS ? result : fake_refuse(result, "%s: planned", call);
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

__attribute__((destructor)) static void count_at_exit(void)
{
    fakenccl_census_t census;

    fakenccl_census(&census);
    fake_log("census %ld %ld %ld", census.communicators, census.works, census.received);
}

/* --- what NCCL says of itself -----------------------------------------------------------
 */

int ncclGetVersion(int *version)
{
    const int result = fake_begin("ncclGetVersion");

    *version = atomic_load(&fake_settings.version);
    return result;
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
