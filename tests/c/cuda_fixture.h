/* SPDX-License-Identifier: Apache-2.0
 * Tests on tests/fakecuda: the driver table, a second process, what the fake counts, each
 * driver call failing in turn. */
#ifndef WSYNC_TESTS_CUDA_FIXTURE_H
#define WSYNC_TESTS_CUDA_FIXTURE_H

#include <dlfcn.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "../fakecuda/fakecuda.h"
#include "device/cuda.h"
#include "fake_reach.h"
#include "harness.h"

enum { PATIENT_MS = 60000 };

#define CU(call) CHECK_EQ(call, WSYNC_CU_SUCCESS)

/* For processes that have not asked for the driver yet, and their children. */
static inline void choose_fake(const char *name, const char *value)
{
    CHECK_EQ(setenv("WSYNC_CUDA_LIB", FAKECUDA_PATH, 1), 0);
    if (name != NULL) {
        CHECK_EQ(setenv(name, value, 1), 0);
    }
}

static inline const wsync_cuda_driver_t *load_driver(void)
{
    const wsync_cuda_driver_t *driver = NULL;
    wsync_error_t err = {0};

    choose_fake(NULL, NULL);
    CHECK_OK(wsync_cuda_driver(&driver, &err), err);
    return driver;
}

/* The driver with a device's primary context current in this thread. */
static inline const wsync_cuda_driver_t *enter_device(int ordinal)
{
    const wsync_cuda_driver_t *driver = load_driver();
    wsync_cu_context_t context = NULL;

    CU(driver->primary_retain(&context, ordinal));
    CU(driver->context_push(context));
    return driver;
}

static inline const wsync_cuda_device_t *open_device(int ordinal)
{
    const wsync_cuda_device_t *device = NULL;
    wsync_error_t err = {0};

    choose_fake(NULL, NULL);
    CHECK_OK(wsync_cuda_device(ordinal, &device, &err), err);
    return device;
}

static inline wsync_memory_t *make_memory(const wsync_cuda_device_t *device,
                                          uint64_t nbytes)
{
    wsync_memory_t *memory = NULL;
    wsync_error_t err = {0};

    CHECK_OK(wsync_memory_create(&device->base, nbytes, &memory, &err), err);
    return memory;
}

static inline void *fake_symbol(const char *name)
{
    void *library = dlopen(FAKECUDA_PATH, RTLD_NOW | RTLD_NOLOAD);
    void *address = library != NULL ? dlsym(library, name) : NULL;

    CHECK(address != NULL);
    (void)dlclose(library);
    return address;
}

/* Of memory of the device, where the processor reaches it. */
static inline unsigned char *bytes_of(const wsync_memory_t *memory)
{
    return reach(memory->data);
}

static inline void fake_fail(const char *call, long k, int code)
{
    fakecuda_fail_func_t function;
    void *address = fake_symbol(FAKECUDA_FAIL);

    memcpy(&function, &address, sizeof(function));
    function(call, k, code);
}

static inline void fake_lose(const char *call, long k, int code)
{
    fakecuda_lose_func_t function;
    void *address = fake_symbol(FAKECUDA_LOSE);

    memcpy(&function, &address, sizeof(function));
    function(call, k, code);
}

static inline const char *fake_failed(void)
{
    fakecuda_failed_func_t function;
    void *address = fake_symbol(FAKECUDA_FAILED);

    memcpy(&function, &address, sizeof(function));
    return function();
}

static inline fakecuda_census_t fake_census(void)
{
    fakecuda_census_t census;
    fakecuda_census_func_t function;
    void *address = fake_symbol(FAKECUDA_CENSUS);

    memcpy(&function, &address, sizeof(function));
    function(&census);
    return census;
}

/* No memory is left. */
static inline void check_clean(void)
{
    const fakecuda_census_t census = fake_census();

    CHECK_EQ(census.physical, 0);
    CHECK_EQ(census.reserved, 0);
    CHECK_EQ(census.mapped, 0);
    CHECK_EQ(census.allocated, 0);
    CHECK_EQ(census.registered, 0);
    CHECK_EQ(census.pushed, 0);
}

/* --- the log of calls ------------------------------------------------------------------
 */

enum { LOG_NBYTES = 1 << 20, CALLS_NBYTES = 4096 };

/* A file without a name, which goes with the process. */
static inline int open_log(void)
{
    const int fd = memfd_create("calls", MFD_CLOEXEC);
    char path[64];

    CHECK(fd >= 0);
    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    choose_fake("WSYNC_FAKE_CUDA_LOG", path);
    return fd;
}

/* The calls since the log was at `from`, without those for the context; text has
 * CALLS_NBYTES.  Polls in a row are one: a slow machine makes more of them. */
static inline void read_calls(int fd, off_t from, char *text)
{
    static char log[LOG_NBYTES];
    const ssize_t nbytes = pread(fd, log, sizeof(log) - 1, from);
    const char *last = "";
    char *line = log;

    CHECK(nbytes >= 0 && nbytes < LOG_NBYTES - 1);
    log[nbytes] = '\0';
    text[0] = '\0';
    while (*line != '\0') {
        char *end = strchr(line, '\n');
        const char *call = strchr(line, ' ') + 1;

        *end = '\0';
        if (strncmp(call, "cuCtx", 5) != 0 &&
            (strcmp(call, "cuStreamQuery") != 0 || strcmp(call, last) != 0)) {
            CHECK(strlen(text) + strlen(call) + 1 < CALLS_NBYTES);
            (void)strcat(strcat(text, call), " ");
            last = call;
        }
        line = end + 1;
    }
}

/* --- a second process -------------------------------------------------------------------
 */

typedef struct peer {
    pid_t pid;
    int socket;
} peer_t;

/* Runs `main` in a child, which no driver has been loaded in. */
static inline peer_t peer_start(void (*main_func)(int socket))
{
    int ends[2];
    peer_t peer;

    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    peer.pid = fork();
    CHECK(peer.pid >= 0);
    if (peer.pid == 0) {
        (void)close(ends[0]);
        main_func(ends[1]);
        _exit(0);
    }
    (void)close(ends[1]);
    peer.socket = ends[0];
    return peer;
}

static inline void peer_end(peer_t peer)
{
    int status = 0;

    CHECK_EQ(waitpid(peer.pid, &status, 0), peer.pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    (void)close(peer.socket);
}

static inline void say(int socket, const void *data, size_t nbytes)
{
    CHECK_EQ(send(socket, data, nbytes, MSG_NOSIGNAL), (ssize_t)nbytes);
}

static inline void hear(int socket, void *data, size_t nbytes)
{
    struct pollfd entry = {.fd = socket, .events = POLLIN};

    CHECK_EQ(poll(&entry, 1, PATIENT_MS), 1);
    CHECK_EQ(recv(socket, data, nbytes, MSG_WAITALL), (ssize_t)nbytes);
}

/* One byte: the other side may go on. */
static inline void nudge(int socket)
{
    say(socket, "!", 1);
}

static inline void await_nudge(int socket)
{
    char byte;

    hear(socket, &byte, 1);
}

static inline void say_fd(int socket, int fd)
{
    char byte = 'f';
    struct iovec part = {&byte, 1};
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof(control.bytes)};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);

    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &fd, sizeof(fd));
    CHECK_EQ(sendmsg(socket, &message, MSG_NOSIGNAL), 1);
}

static inline int hear_fd(int socket)
{
    char byte;
    int fd = -1;
    struct iovec part = {&byte, 1};
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof(control.bytes)};
    struct pollfd entry = {.fd = socket, .events = POLLIN};

    CHECK_EQ(poll(&entry, 1, PATIENT_MS), 1);
    CHECK_EQ(recvmsg(socket, &message, MSG_CMSG_CLOEXEC), 1);
    CHECK(CMSG_FIRSTHDR(&message) != NULL);
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(fd));
    return fd;
}

#endif
