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
