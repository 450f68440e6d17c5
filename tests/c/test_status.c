/* SPDX-License-Identifier: Apache-2.0 */
#include "core/base/status.h"
#include "harness.h"

TEST(every_code_has_a_text)
{
    CHECK_STR(wsync_status_text(WSYNC_OK), "ok");
    CHECK_STR(wsync_status_text(WSYNC_ERR_TIMEOUT), "deadline passed");
    CHECK_STR(wsync_status_text((wsync_status_t)12345), "unknown status");
#define CHECK_TEXT(name, value, text, cls, base) \
    CHECK_STR(wsync_status_text(WSYNC_ERR_##name), text);
    WSYNC_STATUS_MAP(CHECK_TEXT)
#undef CHECK_TEXT
}

TEST(a_failure_fills_the_record)
{
    wsync_error_t err = {0};

    CHECK_EQ(wsync_fail(&err, WSYNC_ERR_OS, 13, "open", "%s: %d", "path", 7), WSYNC_ERR_OS);
    CHECK_EQ(err.status, WSYNC_ERR_OS);
    CHECK_EQ(err.native, 13);
    CHECK_STR(err.origin, "open");
    CHECK_STR(err.message, "path: 7");
    CHECK_EQ(wsync_fail(NULL, WSYNC_ERR_OS, 0, "open", "nobody listens"), WSYNC_ERR_OS);
}

TEST(a_long_message_is_cut)
{
    wsync_error_t err = {0};
    char text[2 * WSYNC_ERROR_MESSAGE_NBYTES];

    memset(text, 'x', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    (void)wsync_fail(&err, WSYNC_ERR_STATE, 0, "test", "%s", text);
    CHECK_EQ(strlen(err.message), WSYNC_ERROR_MESSAGE_NBYTES - 1);
}
