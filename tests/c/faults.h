/* SPDX-License-Identifier: Apache-2.0
 * System calls that fail on demand.  Programs named fault_<name>.c are linked with --wrap,
 * so that every call below that wsync's own code makes comes through here, and every
 * allocation through oom.h. */
#ifndef WSYNC_TESTS_FAULTS_H
#define WSYNC_TESTS_FAULTS_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>

#include "oom.h"

/* What may become of a call. */
enum {
    FAULT_FAILS = 0,
    FAULT_INTERRUPTED = 1, /* a signal may end it with EINTR */
    FAULT_TOLERATED = 2,   /* its failure is none of the caller's */
};

static struct {
    int code;     /* errno of the call that fails; EINTR: only calls that know it count */
    bool closing; /* an attempt cleans up: it has no way left to report anything */
    atomic_long left;   /* calls until one fails; negative: none fails */
    const char *name;   /* of the call that failed */
    bool forgiven;      /* it was tolerated, or made in closing */
    char directory[32]; /* for attempts: empty before and after each */
} fault = {.left = -1};

static bool fault_strikes(const char *name, int kind)
{
    if (fault.code == EINTR && !(kind & FAULT_INTERRUPTED)) {
        return false;
    }
    if (atomic_load(&fault.left) < 0 || atomic_fetch_sub(&fault.left, 1) != 0) {
        return false;
    }
    fault.name = name;
    fault.forgiven = fault.closing || (kind & FAULT_TOLERATED) != 0;
    errno = fault.code;
    return true;
}

#define FAULTY(result, name, failed, kind, parameters, arguments)                       \
    result __real_##name parameters;                                                    \
    result __wrap_##name parameters;                                                    \
    result __wrap_##name parameters                                                     \
    {                                                                                   \
        return fault_strikes(#name, kind) ? (result)(failed) : __real_##name arguments; \
    }

FAULTY(int, socket, -1, FAULT_FAILS, (int domain, int type, int protocol),
       (domain, type, protocol))
FAULTY(int, bind, -1, FAULT_FAILS,
       (int fd, const struct sockaddr *address, socklen_t nbytes), (fd, address, nbytes))
FAULTY(int, listen, -1, FAULT_FAILS, (int fd, int backlog), (fd, backlog))
FAULTY(int, accept4, -1, FAULT_INTERRUPTED,
       (int fd, struct sockaddr *address, socklen_t *nbytes, int flags),
       (fd, address, nbytes, flags))
FAULTY(int, connect, -1, FAULT_INTERRUPTED,
       (int fd, const struct sockaddr *address, socklen_t nbytes), (fd, address, nbytes))
FAULTY(int, getsockopt, -1, FAULT_FAILS,
       (int fd, int level, int option, void *value, socklen_t *nbytes),
       (fd, level, option, value, nbytes))
FAULTY(ssize_t, sendmsg, -1, FAULT_INTERRUPTED,
       (int fd, const struct msghdr *message, int flags), (fd, message, flags))
FAULTY(ssize_t, recvmsg, -1, FAULT_INTERRUPTED, (int fd, struct msghdr *message, int flags),
       (fd, message, flags))
FAULTY(int, poll, -1, FAULT_INTERRUPTED,
       (struct pollfd * entries, nfds_t count, int timeout_ms),
       (entries, count, timeout_ms))
FAULTY(int, memfd_create, -1, FAULT_FAILS, (const char *name, unsigned flags),
       (name, flags))
FAULTY(int, ftruncate, -1, FAULT_INTERRUPTED, (int fd, off_t nbytes), (fd, nbytes))
FAULTY(int, fallocate, -1, FAULT_INTERRUPTED,
       (int fd, int mode, off_t offset, off_t nbytes), (fd, mode, offset, nbytes))
FAULTY(int, fstat, -1, FAULT_FAILS, (int fd, struct stat *info), (fd, info))
FAULTY(void *, mmap, MAP_FAILED, FAULT_FAILS,
       (void *at, size_t nbytes, int protection, int flags, int fd, off_t offset),
       (at, nbytes, protection, flags, fd, offset))
FAULTY(int, madvise, -1, FAULT_INTERRUPTED, (void *at, size_t nbytes, int advice),
       (at, nbytes, advice))
FAULTY(ssize_t, write, -1, FAULT_INTERRUPTED, (int fd, const void *data, size_t nbytes),
       (fd, data, nbytes))
FAULTY(ssize_t, pread, -1, FAULT_INTERRUPTED,
       (int fd, void *data, size_t nbytes, off_t offset), (fd, data, nbytes, offset))
FAULTY(ssize_t, getrandom, -1, FAULT_INTERRUPTED,
       (void *data, size_t nbytes, unsigned flags), (data, nbytes, flags))
FAULTY(char *, mkdtemp, NULL, FAULT_FAILS, (char *name), (name))
FAULTY(FILE *, fopen, NULL, FAULT_TOLERATED, (const char *path, const char *mode),
       (path, mode))
/* Gives its error back instead of setting errno. */
FAULTY(int, pthread_create, fault.code, FAULT_FAILS,
       (pthread_t * thread, const pthread_attr_t *attributes, void *(*run)(void *),
        void *argument),
       (thread, attributes, run, argument))

/* With a new address only: what its flags ask for. */
void *__real_mremap(void *at, size_t nbytes, size_t new_nbytes, int flags, ...);
void *__wrap_mremap(void *at, size_t nbytes, size_t new_nbytes, int flags, ...);
void *__wrap_mremap(void *at, size_t nbytes, size_t new_nbytes, int flags, ...)
{
    va_list arguments;
    void *place;

    va_start(arguments, flags);
    place = va_arg(arguments, void *);
    va_end(arguments);
    return fault_strikes("mremap", FAULT_FAILS)
               ? MAP_FAILED
               : __real_mremap(at, nbytes, new_nbytes, flags, place);
}

int __real_fcntl(int fd, int command, ...);
int __wrap_fcntl(int fd, int command, ...);
int __wrap_fcntl(int fd, int command, ...)
{
    va_list arguments;
    long argument;

    va_start(arguments, command);
    argument = va_arg(arguments, long);
    va_end(arguments);
    return fault_strikes("fcntl", FAULT_FAILS) ? -1 : __real_fcntl(fd, command, argument);
}

/* Futexes alone, and of those the waits: waking fails for nobody. */
long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...);
long __wrap_syscall(long number, ...)
{
    long values[6];
    va_list arguments;

    va_start(arguments, number);
    for (int i = 0; i < 6; i++) {
        values[i] = va_arg(arguments, long);
    }
    va_end(arguments);
    CHECK_EQ(number, SYS_futex);
    if ((int)values[1] == FUTEX_WAIT && fault_strikes("futex", FAULT_INTERRUPTED)) {
        return -1;
    }
    return __real_syscall(number, values[0], values[1], values[2], values[3], values[4],
                          values[5]);
}

/* These do not fail on Linux, unless they are given what is closed already. */
int __real_close(int fd);
int __wrap_close(int fd);
int __wrap_close(int fd)
{
    const int result = __real_close(fd);

    if (result != 0) {
        FAIL("close of descriptor %d: %s", fd, strerror(errno));
    }
    return result;
}

int __real_munmap(void *at, size_t nbytes);
int __wrap_munmap(void *at, size_t nbytes);
int __wrap_munmap(void *at, size_t nbytes)
{
    const int result = __real_munmap(at, nbytes);

    if (result != 0) {
        FAIL("munmap of %zu bytes: %s", nbytes, strerror(errno));
    }
    return result;
}

/* --- what an attempt may not leave behind ---------------------------------------------
 */

typedef struct fault_census {
    long blocks;
    long fds;
    long threads;
    long mappings; /* of memfds */
    long files;
} fault_census_t;

static inline long fault_count_entries(const char *path)
{
    DIR *directory = opendir(path);
    long count = 0;

    CHECK(directory != NULL);
    while (readdir(directory) != NULL) {
        count++;
    }
    (void)closedir(directory);
    return count;
}

static inline long fault_count_mappings(void)
{
    FILE *maps = __real_fopen("/proc/self/maps", "re");
    char line[512];
    long count = 0;

    CHECK(maps != NULL);
    while (fgets(line, (int)sizeof(line), maps) != NULL) {
        count += strstr(line, "/memfd:wsync") != NULL;
    }
    (void)fclose(maps);
    return count;
}

static inline fault_census_t fault_take_census(void)
{
    return (fault_census_t){.blocks = atomic_load(&oom_live),
                            .fds = fault_count_entries("/proc/self/fd"),
                            .threads = fault_count_entries("/proc/self/task"),
                            .mappings = fault_count_mappings(),
                            .files = fault_count_entries(fault.directory)};
}

/* A thread that was joined may be listed for a moment yet. */
static inline fault_census_t fault_await_census(const fault_census_t *before)
{
    const struct timespec moment = {.tv_nsec = 1000 * 1000};

    for (int i = 0; i < 10000; i++) {
        if (fault_count_entries("/proc/self/task") <= before->threads) {
            break;
        }
        (void)nanosleep(&moment, NULL);
    }
    return fault_take_census();
}

static inline void fault_check_census(const fault_census_t *before, long k)
{
    const fault_census_t after = fault_await_census(before);

    if (memcmp(before, &after, sizeof(after)) != 0) {
        FAIL(
            "call %ld (%s) failing: before and after: blocks %ld %ld, descriptors %ld "
            "%ld, threads %ld %ld, mappings %ld %ld, files %ld %ld",
            k, fault.name != NULL ? fault.name : "none", before->blocks, after.blocks,
            before->fds, after.fds, before->threads, after.threads, before->mappings,
            after.mappings, before->files, after.files);
    }
}

/* --- attempts ------------------------------------------------------------------------- */

/* The error of the call that failed, with its name, and no other. */
static inline void fault_check_error(wsync_status_t status, const wsync_error_t *err,
                                     long k)
{
    const bool full = fault.code == ENOMEM && status == WSYNC_ERR_NO_MEMORY;

    if ((status != WSYNC_ERR_OS && !full) || err->status != status ||
        err->native != fault.code || strstr(err->message, fault.name) == NULL ||
        strcmp(err->origin, fault.name) != 0) {
        FAIL("call %ld (%s) failing: status %d, native %d, origin %s: %s", k, fault.name,
             (int)status, err->native, err->origin, err->message);
    }
}

/* Repeats an attempt (see oom.h; it sets fault.closing before it cleans up) with the k-th
 * call failing with `code`, k = 0, 1, ..., until none is left to fail.  EINTR must not show
 * at all; any other code is what the attempt reports.  Nothing may be left behind.  Returns
 * how many calls were failed. */
static long fault_run(oom_attempt_func_t attempt, void *context, int code)
{
    wsync_error_t first = {0};

    (void)snprintf(fault.directory, sizeof(fault.directory), "/tmp/wsync-fault-XXXXXX");
    CHECK(__real_mkdtemp(fault.directory) != NULL);
    CHECK_OK(attempt(context, &first), first); /* a sanitizer starts its thread with ours */
    fault.code = code;
    for (long k = 0;; k++) {
        const fault_census_t before = fault_take_census();
        wsync_error_t err = {0};
        wsync_status_t status;

        fault.name = NULL;
        fault.forgiven = code == EINTR;
        fault.closing = false;
        atomic_store(&fault.left, k);
        status = attempt(context, &err);
        atomic_store(&fault.left, -1);
        fault_check_census(&before, k);
        if (fault.name == NULL || fault.forgiven || code == EINTR) {
            if (status != WSYNC_OK) {
                FAIL("call %ld (%s) failing: status %d: %s", k,
                     fault.name != NULL ? fault.name : "none", (int)status, err.message);
            }
        } else {
            fault_check_error(status, &err, k);
        }
        if (fault.name == NULL) {
            CHECK_EQ(rmdir(fault.directory), 0);
            fault.directory[0] = '\0';
            (void)printf("%ld calls failed in turn\n", k);
            CHECK(k > 0);
            return k;
        }
    }
}

#endif
