/* SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>

#include "device/sealed_blob.h"
#include "harness.h"
#include "ipc/channel.h"
#include "ipc/frame.h"

enum { SOON_MS = 20, PATIENT_MS = 10000 };

static const uint8_t token[WSYNC_TOKEN_NBYTES] = {1, 2, 3, 4, 5, 6, 7, 8};

static int count_fds(void)
{
    DIR *directory = opendir("/proc/self/fd");
    int count = 0;

    CHECK(directory != NULL);
    while (readdir(directory) != NULL) {
        count++;
    }
    (void)closedir(directory);
    return count;
}

/* Both ends of a connection in one thread: what is sent waits in the socket. */
typedef struct pair {
    wsync_listener_t *listener;
    wsync_channel_t *here;
    wsync_channel_t *there;
} pair_t;

static pair_t make_pair(void)
{
    pair_t pair = {0};
    wsync_frame_t hello = {.arguments = {5}, .payload_nbytes = 2, .payload = "hi"};
    wsync_frame_t got;
    wsync_error_t err = {0};

    CHECK_OK(wsync_listener_create(NULL, &pair.listener, &err), err);
    CHECK_OK(wsync_channel_connect(wsync_listener_path(pair.listener), token, &hello,
                                   PATIENT_MS, &pair.there, &err),
             err);
    CHECK_OK(
        wsync_listener_accept(pair.listener, token, PATIENT_MS, &pair.here, &got, &err),
        err);
    CHECK_EQ(got.kind, WSYNC_FRAME_HELLO);
    CHECK_EQ(got.arguments[0], 5);
    CHECK_EQ(got.payload_nbytes, 2);
    CHECK(memcmp(got.payload, "hi", 2) == 0);
    CHECK_EQ(wsync_channel_peer_pid(pair.here), getpid());
    CHECK_EQ(wsync_channel_peer_pid(pair.there), getpid());
    return pair;
}

static void free_pair(pair_t *pair)
{
    wsync_channel_destroy(pair->here);
    wsync_channel_destroy(pair->there);
    wsync_listener_destroy(pair->listener);
}

static int raw_connect(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);

    CHECK(fd >= 0);
    (void)snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
    CHECK_EQ(connect(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    return fd;
}

/* One message with `count` descriptors of this process's standard input. */
static void raw_send(int fd, const void *data, size_t nbytes, int count)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(64 * sizeof(int))];
    } control = {0};
    struct iovec part = {.iov_base = (void *)(uintptr_t)data, .iov_len = nbytes};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    const int input = open("/dev/null", O_RDONLY);

    CHECK(input >= 0);
    if (count > 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE((size_t)count * sizeof(int));
        control.header.cmsg_level = SOL_SOCKET;
        control.header.cmsg_type = SCM_RIGHTS;
        control.header.cmsg_len = CMSG_LEN((size_t)count * sizeof(int));
        for (int i = 0; i < count; i++) {
            memcpy(CMSG_DATA(&control.header) + (size_t)i * sizeof(int), &input,
                   sizeof(input));
        }
    }
    CHECK_EQ(sendmsg(fd, &message, MSG_NOSIGNAL), (ssize_t)nbytes);
    (void)close(input);
}

TEST(frames_carry_arguments_payload_and_descriptors)
{
    pair_t pair = make_pair();
    wsync_frame_t sent = {.kind = 77,
                          .arguments = {1, UINT64_MAX, 1ULL << 63, 4},
                          .payload_nbytes = WSYNC_FRAME_PAYLOAD_NBYTES,
                          .fd_count = 2};
    wsync_frame_t got;
    wsync_error_t err = {0};
    int ends[2];
    char byte = 0;

    memset(sent.payload, 0xa5, sizeof(sent.payload));
    CHECK_EQ(pipe(ends), 0);
    sent.fds[0] = ends[0];
    sent.fds[1] = ends[1];
    CHECK_OK(wsync_channel_send(pair.here, &sent, PATIENT_MS, &err), err);
    (void)close(ends[0]);
    (void)close(ends[1]);
    CHECK_OK(wsync_channel_receive(pair.there, &got, PATIENT_MS, &err), err);
    CHECK_EQ(got.kind, 77);
    CHECK(memcmp(got.arguments, sent.arguments, sizeof(sent.arguments)) == 0);
    CHECK_EQ(got.payload_nbytes, sent.payload_nbytes);
    CHECK(memcmp(got.payload, sent.payload, sizeof(sent.payload)) == 0);
    CHECK_EQ(got.fd_count, 2);
    CHECK(fcntl(got.fds[0], F_GETFD) & FD_CLOEXEC);
    CHECK_EQ(write(got.fds[1], "x", 1), 1);
    CHECK_EQ(read(got.fds[0], &byte, 1), 1);
    CHECK_EQ(byte, 'x');
    wsync_frame_fini(&got);
    CHECK_EQ(got.fd_count, 0);
    free_pair(&pair);
}

TEST(directory_is_private_and_removed_by_its_maker_only)
{
    wsync_listener_t *listener = NULL;
    wsync_error_t err = {0};
    char directory[WSYNC_PATH_NBYTES];
    struct stat info;
    int status = 0;
    pid_t child;

    CHECK_OK(wsync_listener_create("/tmp", &listener, &err), err);
    (void)snprintf(directory, sizeof(directory), "%s", wsync_listener_path(listener));
    *strrchr(directory, '/') = '\0';
    CHECK_EQ(stat(directory, &info), 0);
    CHECK_EQ(info.st_mode & 0777, 0700);
    child = fork();
    if (child == 0) {
        wsync_listener_destroy(listener);
        _exit(0);
    }
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(access(wsync_listener_path(listener), F_OK), 0);
    wsync_listener_destroy(listener);
    CHECK(access(directory, F_OK) < 0 && errno == ENOENT);
}

TEST(long_parent_is_refused_with_both_numbers)
{
    char parent[150] = "/tmp/";
    wsync_listener_t *listener = NULL;
    wsync_error_t err = {0};

    memset(parent + 5, 'a', 120);
    CHECK_EQ(wsync_listener_create(parent, &listener, &err), WSYNC_ERR_INVALID);
    CHECK(listener == NULL);
    CHECK_HAS(err.message, "140 bytes");
    CHECK_HAS(err.message, "107");
    parent[20] = '\0';
    CHECK_EQ(wsync_listener_create(parent, &listener, &err), WSYNC_ERR_OS);
    CHECK_EQ(err.native, ENOENT);
    /* A TMPDIR that is too long is a preference that cannot be met, not an error. */
    parent[20] = 'a';
    CHECK_EQ(setenv("TMPDIR", parent, 1), 0);
    CHECK_OK(wsync_listener_create(NULL, &listener, &err), err);
    CHECK(strncmp(wsync_listener_path(listener), "/tmp/wsync-", 11) == 0);
    wsync_listener_destroy(listener);
}

TEST(strangers_are_closed_and_do_not_end_the_wait)
{
    wsync_listener_t *listener = NULL;
    wsync_channel_t *wrong = NULL;
    wsync_channel_t *right = NULL;
    wsync_channel_t *accepted = NULL;
    wsync_frame_t hello = {0};
    wsync_frame_t got;
    uint8_t other[WSYNC_TOKEN_NBYTES];
    uint8_t wire[WSYNC_FRAME_HEADER_NBYTES];
    wsync_error_t err = {0};
    int malformed;
    int short_one;
    int silent;
    char byte;

    memcpy(other, token, sizeof(other));
    other[15] ^= 1;
    CHECK_OK(wsync_listener_create(NULL, &listener, &err), err);
    malformed = raw_connect(wsync_listener_path(listener));
    raw_send(malformed, "GET / HTTP/1.1", 14, 3);
    short_one = raw_connect(wsync_listener_path(listener));
    wsync_frame_encode_header(&(wsync_frame_t){.kind = WSYNC_FRAME_HELLO}, wire);
    raw_send(short_one, wire, sizeof(wire), 1);
    CHECK_OK(wsync_channel_connect(wsync_listener_path(listener), other, &hello, PATIENT_MS,
                                   &wrong, &err),
             err);
    silent = raw_connect(wsync_listener_path(listener)); /* is given its time */
    CHECK_OK(wsync_channel_connect(wsync_listener_path(listener), token, &hello, PATIENT_MS,
                                   &right, &err),
             err);
    CHECK_OK(wsync_listener_accept(listener, token, PATIENT_MS, &accepted, &got, &err),
             err);
    CHECK_EQ(wsync_channel_receive(wrong, &got, PATIENT_MS, &err), WSYNC_ERR_CLOSED);
    CHECK(recv(malformed, &byte, 1, 0) <= 0);
    CHECK(recv(short_one, &byte, 1, 0) <= 0);
    wsync_channel_destroy(accepted);
    wsync_channel_destroy(right);
    wsync_channel_destroy(wrong);
    wsync_listener_destroy(listener);
    (void)close(malformed);
    (void)close(short_one);
    (void)close(silent);
}

TEST(nobody_listens)
{
    wsync_channel_t *channel = NULL;
    wsync_frame_t hello = {0};
    wsync_error_t err = {0};
    char path[200] = {0};

    CHECK_EQ(
        wsync_channel_connect("/tmp/wsync-none/s", token, &hello, SOON_MS, &channel, &err),
        WSYNC_ERR_CLOSED);
    CHECK_HAS(err.message, "/tmp/wsync-none/s");
    memset(path, 'a', 150);
    CHECK_EQ(wsync_channel_connect(path, token, &hello, SOON_MS, &channel, &err),
             WSYNC_ERR_INVALID);
    hello.payload_nbytes = WSYNC_FRAME_PAYLOAD_NBYTES;
    CHECK_EQ(wsync_channel_connect("/tmp/x", token, &hello, SOON_MS, &channel, &err),
             WSYNC_ERR_INVALID);
    CHECK(channel == NULL);
}

TEST(descriptors_that_do_not_fit_this_process_are_a_protocol_error)
{
    pair_t pair = make_pair();
    const int before = count_fds();
    wsync_frame_t got;
    wsync_error_t err = {0};
    uint8_t wire[WSYNC_FRAME_HEADER_NBYTES];
    struct rlimit limit;
    struct rlimit low;

    wsync_frame_encode_header(&(wsync_frame_t){.kind = 9}, wire);
    raw_send(wsync_channel_fd(pair.there), wire, sizeof(wire), 4);
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
    low = limit;
    low.rlim_cur = (rlim_t)dup(0) + 2; /* room for two of the four */
    (void)close((int)low.rlim_cur - 2);
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
    CHECK_EQ(wsync_channel_receive(pair.here, &got, PATIENT_MS, &err), WSYNC_ERR_PROTOCOL);
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    CHECK_EQ(count_fds(), before);
    free_pair(&pair);
}

TEST(timeouts_leave_the_channel_good)
{
    pair_t pair = make_pair();
    wsync_frame_t frame = {.kind = 3, .payload_nbytes = 4000};
    wsync_frame_t got = {.kind = 123};
    wsync_error_t err = {0};
    wsync_status_t status;
    int sent = 0;

    CHECK_EQ(wsync_channel_receive(pair.there, &got, SOON_MS, &err), WSYNC_ERR_TIMEOUT);
    CHECK_EQ(wsync_channel_receive(pair.there, &got, -5, &err), WSYNC_ERR_TIMEOUT);
    CHECK_EQ(got.kind, 123);
    do {
        frame.arguments[0] = (uint64_t)sent;
        status = wsync_channel_send(pair.here, &frame, SOON_MS, &err);
        sent += status == WSYNC_OK;
    } while (status == WSYNC_OK && sent < 100000);
    CHECK_EQ(status, WSYNC_ERR_TIMEOUT);
    for (int i = 0; i < sent; i++) {
        CHECK_OK(wsync_channel_receive(pair.there, &got, PATIENT_MS, &err), err);
        CHECK_EQ(got.arguments[0], i);
    }
    CHECK_OK(wsync_channel_send(pair.here, &frame, PATIENT_MS, &err), err);
    free_pair(&pair);
}

TEST(last_words_are_heard_after_a_reset)
{
    pair_t pair = make_pair();
    const wsync_frame_t frame = {.kind = 3};
    const wsync_frame_t last = {.kind = 4};
    wsync_frame_t got;
    wsync_error_t err = {0};

    /* A peer that leaves without having read what was sent to it. */
    CHECK_OK(wsync_channel_send(pair.here, &frame, PATIENT_MS, &err), err);
    CHECK_OK(wsync_channel_send(pair.there, &last, PATIENT_MS, &err), err);
    wsync_channel_destroy(pair.there);
    pair.there = NULL;
    CHECK_OK(wsync_channel_receive(pair.here, &got, PATIENT_MS, &err), err);
    CHECK_EQ(got.kind, 4);
    CHECK_EQ(wsync_channel_receive(pair.here, &got, PATIENT_MS, &err), WSYNC_ERR_CLOSED);
    CHECK_EQ(wsync_channel_send(pair.here, &frame, PATIENT_MS, &err), WSYNC_ERR_CLOSED);
    CHECK_HAS(err.message, "process ");
    free_pair(&pair);
}

static void ignore_signal(int number)
{
    (void)number;
}

TEST(signals_do_not_end_a_wait)
{
    pair_t pair = make_pair();
    const struct itimerval often = {.it_interval = {.tv_usec = 2000},
                                    .it_value = {.tv_usec = 2000}};
    const struct itimerval never = {0};
    const struct sigaction action = {.sa_handler = ignore_signal};
    wsync_frame_t got;
    wsync_error_t err = {0};

    CHECK_EQ(sigaction(SIGALRM, &action, NULL), 0); /* without SA_RESTART */
    CHECK_EQ(setitimer(ITIMER_REAL, &often, NULL), 0);
    CHECK_EQ(wsync_channel_receive(pair.here, &got, 100, &err), WSYNC_ERR_TIMEOUT);
    CHECK_EQ(setitimer(ITIMER_REAL, &never, NULL), 0);
    free_pair(&pair);
}

TEST(blobs_are_sealed_and_checked)
{
    uint8_t *data = NULL;
    wsync_error_t err = {0};
    int ends[2];
    int loose;
    int fd = -1;

    CHECK_OK(wsync_blob_create((const uint8_t *)"abcdef", 6, &fd, &err), err);
    CHECK(write(fd, "x", 1) < 0 && errno == EPERM);
    CHECK(ftruncate(fd, 3) < 0 && errno == EPERM);
    CHECK_OK(wsync_blob_read(fd, 6, &data, &err), err);
    CHECK(memcmp(data, "abcdef", 6) == 0);
    free(data);
    data = NULL;
    CHECK_EQ(wsync_blob_read(fd, 7, &data, &err), WSYNC_ERR_PROTOCOL);
    CHECK_HAS(err.message, "6 bytes and is said to have 7");
    CHECK_EQ(wsync_blob_read(fd, UINT64_MAX, &data, &err), WSYNC_ERR_PROTOCOL);
    (void)close(fd);
    CHECK_OK(wsync_blob_create(NULL, 0, &fd, &err), err);
    CHECK_OK(wsync_blob_read(fd, 0, &data, &err), err);
    free(data);
    data = NULL;
    (void)close(fd);
    loose = memfd_create("loose", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK_EQ(write(loose, "abcdef", 6), 6);
    CHECK_EQ(wsync_blob_read(loose, 6, &data, &err), WSYNC_ERR_REFUSED);
    CHECK_EQ(fcntl(loose, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
    CHECK_EQ(wsync_blob_read(loose, 6, &data, &err), WSYNC_ERR_REFUSED);
    CHECK_EQ(pipe(ends), 0);
    CHECK_EQ(wsync_blob_read(ends[0], 6, &data, &err), WSYNC_ERR_REFUSED);
    CHECK(data == NULL);
    (void)close(ends[0]);
    (void)close(ends[1]);
    (void)close(loose);
    /* One byte above the limit, sealed, and costing its maker nothing. */
    loose = memfd_create("large", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK_EQ(ftruncate(loose, (off_t)WSYNC_BLOB_MAX_NBYTES + 1), 0);
    CHECK_EQ(fcntl(loose, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE), 0);
    CHECK_EQ(wsync_blob_read(loose, WSYNC_BLOB_MAX_NBYTES + 1, &data, &err),
             WSYNC_ERR_PROTOCOL);
    (void)close(loose);
}

TEST(addresses_read_back_what_was_written)
{
    char address[WSYNC_ADDRESS_NBYTES];
    uint8_t read_token[WSYNC_TOKEN_NBYTES] = {0};
    char path[WSYNC_PATH_NBYTES] = "untouched";
    char text[300];
    wsync_error_t err = {0};

    wsync_address_format(token, "/tmp/x/s", address);
    CHECK_STR(address, "01020304050607080000000000000000@/tmp/x/s");
    text[0] = '\0';
    CHECK_EQ(wsync_address_parse(text, read_token, path, &err), WSYNC_ERR_INVALID);
    CHECK_EQ(wsync_address_parse("0102", read_token, path, &err), WSYNC_ERR_INVALID);
    CHECK_HAS(err.message, "characters 4 and 5");
    CHECK_EQ(wsync_address_parse("010G", read_token, path, &err), WSYNC_ERR_INVALID);
    CHECK_HAS(err.message, "characters 2 and 3");
    (void)snprintf(text, sizeof(text), "%.32s/tmp/x/s", address);
    CHECK_EQ(wsync_address_parse(text, read_token, path, &err), WSYNC_ERR_INVALID);
    CHECK_HAS(err.message, "'@'");
    (void)snprintf(text, sizeof(text), "%.33s", address);
    CHECK_EQ(wsync_address_parse(text, read_token, path, &err), WSYNC_ERR_INVALID);
    (void)snprintf(text, sizeof(text), "%.33s%0*d", address, WSYNC_PATH_NBYTES, 1);
    CHECK_EQ(wsync_address_parse(text, read_token, path, &err), WSYNC_ERR_INVALID);
    CHECK_HAS(err.message, "108 bytes");
    CHECK_STR(path, "untouched");
    CHECK_OK(wsync_address_parse(address, read_token, path, &err), err);
    CHECK_STR(path, "/tmp/x/s");
    CHECK(memcmp(read_token, token, sizeof(token)) == 0);
}

TEST(tokens_differ)
{
    uint8_t one[WSYNC_TOKEN_NBYTES] = {0};
    uint8_t two[WSYNC_TOKEN_NBYTES] = {0};
    wsync_error_t err = {0};

    CHECK_OK(wsync_token_create(one, &err), err);
    CHECK_OK(wsync_token_create(two, &err), err);
    CHECK(memcmp(one, two, sizeof(one)) != 0);
}
