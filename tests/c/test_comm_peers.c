/* SPDX-License-Identifier: Apache-2.0
 * Exchanges whose other rank leaves, dies or sends what it should not. */
#include <signal.h>

#include "comm_fixture.h"

/* --- ranks that leave ------------------------------------------------------------------
 */

TEST(a_rank_that_leaves_in_the_middle_is_named)
{
    duo_t duo = open_duo();
    wsync_error_t err = {0};
    char text[64];

    send_of(&duo, 0, 0);
    wsync_comm_close(duo.comms[1]);
    CHECK_EQ(wsync_comm_wait(duo.comms[0], 0, duo.stream, PATIENT_MS, &err),
             WSYNC_ERR_CLOSED);
    (void)snprintf(text, sizeof(text),
                   "rank 1 (pid %d) closed the connection while round 0", (int)getpid());
    CHECK_HAS(err.message, text);
    CHECK_EQ(wsync_comm_wait(duo.comms[0], 0, duo.stream, SOON_MS, &err), WSYNC_ERR_STATE);
    CHECK_HAS(err.message, "closed the connection");
    CHECK_EQ(wsync_comm_acquire(duo.comms[1], 0, SOON_MS, &err), WSYNC_ERR_STATE);
    close_duo(&duo);
}

TEST(a_rank_that_is_needed_cannot_leave_in_order)
{
    duo_t duo = {0};
    wsync_error_t err = {0};

    make_duo(&duo, 0);
    connect_duo(&duo);
    CHECK_OK(wsync_comm_begin(duo.comms[0], duo.plans[0], &err), err);
    wsync_comm_close(duo.comms[1]); /* between updates: it says goodbye */
    CHECK_OK(wsync_comm_acquire(duo.comms[0], 0, PATIENT_MS, &err), err);
    CHECK_EQ(wsync_comm_post(duo.comms[0], 0, duo.stream, &err), WSYNC_ERR_CLOSED);
    CHECK_HAS(err.message, "had left the exchange while round 0");
    close_duo(&duo);
}

TEST(a_fork_that_closes_what_it_inherited_says_nothing_to_others)
{
    duo_t duo = {0};
    wsync_error_t err = {0};
    int status = 0;
    pid_t child;

    make_duo(&duo, 0);
    connect_duo(&duo);
    child = fork();
    if (child == 0) {
        wsync_comm_close(duo.comms[0]);
        wsync_comm_close(duo.comms[1]);
        _exit(0);
    }
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    for (int r = 0; r < 2; r++) {
        CHECK_OK(wsync_comm_begin(duo.comms[r], duo.plans[r], &err), err);
        send_of(&duo, r, 0);
    }
    receive_of(&duo, 0, 0);
    receive_of(&duo, 1, 0);
    close_duo(&duo);
}

TEST(spans_outlive_close)
{
    duo_t duo = open_duo();
    wsync_span_t spans[64];
    wsync_error_t err = {0};
    size_t count = 0;

    CHECK_OK(wsync_comm_acquire(duo.comms[0], 0, PATIENT_MS, &err), err);
    (void)wsync_plan_messages(duo.plans[0], 0, &count);
    CHECK(count >= 2);
    CHECK_OK(wsync_comm_spans(duo.comms[0], 0, spans, count, &err), err);
    wsync_comm_close(duo.comms[0]);
    for (size_t i = 0; i < count; i++) {
        memset(reach(spans[i].data), 1, spans[i].nbytes);
    }
    close_duo(&duo);
}

TEST(a_killed_rank_is_named)
{
    duo_t duo = {0};
    wsync_error_t err = {0};
    char text[64];
    int ends[2];
    char byte;
    pid_t child;

    make_duo(&duo, 0);
    CHECK_EQ(pipe(ends), 0);
    child = fork();
    if (child == 0) {
        const char *addresses[2] = {wsync_comm_address(duo.comms[0]), NULL};

        CHECK_OK(wsync_comm_connect(duo.comms[1], addresses, PATIENT_MS, &err), err);
        CHECK_EQ(write(ends[1], "c", 1), 1);
        (void)pause();
        _exit(1);
    }
    CHECK_OK(wsync_comm_connect(duo.comms[0], NULL, PATIENT_MS, &err), err);
    CHECK_OK(wsync_comm_begin(duo.comms[0], duo.plans[0], &err), err);
    send_of(&duo, 0, 0);
    CHECK_EQ(read(ends[0], &byte, 1), 1);
    CHECK_EQ(kill(child, SIGKILL), 0);
    CHECK_EQ(wsync_comm_wait(duo.comms[0], 0, duo.stream, PATIENT_MS, &err),
             WSYNC_ERR_CLOSED);
    (void)snprintf(text, sizeof(text), "rank 1 (pid %d) closed the connection", (int)child);
    CHECK_HAS(err.message, text);
    CHECK_EQ(waitpid(child, NULL, 0), child);
    close_duo(&duo);
}

/* --- hostile ranks ---------------------------------------------------------------------
 */

/* Says that it is rank 1 of 2 to rank 0, and takes its welcome. */
static wsync_channel_t *raw_rank(wsync_comm_t *comm, wsync_frame_t hello,
                                 wsync_status_t expected, wsync_error_t *err)
{
    uint8_t token[WSYNC_TOKEN_NBYTES];
    char path[WSYNC_PATH_NBYTES];
    wsync_channel_t *channel = NULL;

    CHECK_OK(wsync_address_parse(wsync_comm_address(comm), token, path, err), *err);
    CHECK_OK(wsync_channel_connect(path, token, &hello, PATIENT_MS, &channel, err), *err);
    CHECK_EQ(wsync_comm_connect(comm, NULL, PATIENT_MS, err), expected);
    return channel;
}

static wsync_frame_t hello_of(const wsync_memory_t *staging, const wsync_memory_t *control)
{
    return (wsync_frame_t){.arguments = {1, 4096, 2, SHARED_PURPOSE},
                           .fds = {staging->fd, control->fd},
                           .fd_count = 2};
}

TEST(introductions_are_checked)
{
    wsync_memory_t *staging = NULL;
    wsync_memory_t *control = NULL;
    wsync_error_t err = {0};

    CHECK_OK(wsync_memory_create(device(), 8192, &staging, &err), err);
    CHECK_OK(wsync_control_create(device(), 4096, &control, &err), err);
    for (int i = 0; i < 9; i++) {
        wsync_frame_t hello = hello_of(staging, control);
        wsync_status_t expected = WSYNC_ERR_PROTOCOL;
        wsync_comm_t *comm = NULL;

        switch (i) {
        case 0:
            expected = WSYNC_OK;
            break;
        case 1:
            hello.arguments[0] = 0;
            break;
        case 2:
            hello.arguments[0] = UINT64_MAX;
            break;
        case 3:
            hello.arguments[1] = UINT64_MAX;
            break;
        case 4:
            hello.arguments[2] = 3;
            break;
        case 5:
            hello.arguments[3] = 0;
            break;
        case 6:
            hello.fd_count = 1;
            break;
        case 7:
            hello.arguments[1] = 4 << 20; /* more than a GPU rounds up to */
            expected = WSYNC_ERR_INVALID;
            break;
        default:
            hello.fds[1] = hello.fds[0];
            expected = on_host() ? WSYNC_ERR_INVALID : WSYNC_ERR_REFUSED;
            break;
        }
        CHECK_OK(wsync_comm_create_shared(device(), NULL, 0, 2, 4096, &comm, &err), err);
        wsync_channel_destroy(raw_rank(comm, hello, expected, &err));
        wsync_comm_destroy(comm);
    }
    wsync_memory_destroy(staging);
    wsync_memory_destroy(control);
}

TEST(announcements_are_checked)
{
    const wsync_frame_t bad[] = {
        {.kind = 0},
        {.kind = SHARED_WELCOME},
        {.kind = SHARED_READY},
        {.kind = SHARED_RELEASED, .arguments = {2}}, /* round 1 has not been posted */
        {.kind = SHARED_RELEASED},
        {.kind = SHARED_READY, .arguments = {1}, .fds = {0}, .fd_count = 1},
    };
    wsync_memory_t *staging = NULL;
    wsync_memory_t *control = NULL;
    wsync_stream_t *stream = NULL;
    wsync_plan_t *plan = make_plan(0, 2, 2, 4096);
    wsync_error_t err = {0};

    CHECK_OK(wsync_memory_create(device(), 8192, &staging, &err), err);
    CHECK_OK(wsync_control_create(device(), 4096, &control, &err), err);
    CHECK_OK(wsync_stream_create(device(), 1, &stream, &err), err);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        wsync_channel_t *channel;
        wsync_comm_t *comm = NULL;

        CHECK_OK(wsync_comm_create_shared(device(), NULL, 0, 2, 4096, &comm, &err), err);
        channel = raw_rank(comm, hello_of(staging, control), WSYNC_OK, &err);
        CHECK_OK(wsync_comm_begin(comm, plan, &err), err);
        CHECK_OK(wsync_comm_acquire(comm, 0, PATIENT_MS, &err), err);
        CHECK_OK(wsync_comm_post(comm, 0, stream, &err), err);
        CHECK_OK(wsync_channel_send(channel, &bad[i], PATIENT_MS, &err), err);
        CHECK_EQ(wsync_comm_wait(comm, 0, stream, PATIENT_MS, &err), WSYNC_ERR_PROTOCOL);
        CHECK_HAS(err.message, "rank 1 (pid ");
        wsync_channel_destroy(channel);
        wsync_comm_destroy(comm);
    }
    wsync_plan_destroy(plan);
    wsync_stream_destroy(stream);
    wsync_memory_destroy(staging);
    wsync_memory_destroy(control);
}
