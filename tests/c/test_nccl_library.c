/* SPDX-License-Identifier: Apache-2.0
 * The table of NCCL's functions, on tests/fakenccl.  Where the library is looked for is
 * tested in tests/test_nccl_library.py, and the table itself by .ci/nccl.py. */
#include "nccl_fixture.h"

TEST(every_function_is_found)
{
    const wsync_nccl_library_t *nccl = load_nccl(0);
    const wsync_nccl_library_t *again = NULL;
    const char *nowhere[] = {"/nowhere/libnccl.so.2"};
    wsync_error_t err = {0};

    CHECK_EQ(nccl->version, 22907);
    CHECK_STR(nccl->path, FAKENCCL_PATH);
#define FOUND(result, member, symbol, since, parameters) CHECK(nccl->member != NULL);
    WSYNC_NCCL_MAP(FOUND)
#undef FOUND
    CHECK_OK(wsync_nccl_library(nowhere, 1, &again, &err), err);
    CHECK(again == nccl);
}

TEST(a_library_that_is_not_there_can_come_later)
{
    const wsync_nccl_library_t *nccl = NULL;
    const char *nowhere[] = {"/nowhere/one", "/nowhere/two"};
    wsync_error_t err = {0};

    CHECK_EQ(unsetenv("WSYNC_NCCL_LIB"), 0);
    if (dlopen("libnccl.so.2", RTLD_NOW) != NULL) {
        return; /* this machine has one */
    }
    CHECK_EQ(wsync_nccl_library(nowhere, 2, &nccl, &err), WSYNC_ERR_UNSUPPORTED);
    CHECK_EQ(err.status, WSYNC_ERR_UNSUPPORTED);
    CHECK_HAS(err.message, "no NCCL (it is in the packages");
    CHECK_HAS(err.message, "/nowhere/one: cannot open");
    CHECK_HAS(err.message, "; /nowhere/two: cannot open");
    CHECK_HAS(err.message, "; libnccl.so.2: cannot open");
    CHECK(nccl == NULL);
    nowhere[1] = FAKENCCL_PATH;
    CHECK_OK(wsync_nccl_library(nowhere, 2, &nccl, &err), err);
    CHECK_STR(nccl->path, FAKENCCL_PATH);
}

TEST(errors_have_the_library_s_words)
{
    const wsync_nccl_library_t *nccl = load_nccl(0);
    wsync_error_t err = {0};

    CHECK_EQ(wsync_nccl_check(nccl, WSYNC_NCCL_SUCCESS, "ncclSend", &err, "rank %d", 3),
             WSYNC_OK);
    CHECK_EQ(
        wsync_nccl_check(nccl, WSYNC_NCCL_REMOTE_ERROR, "ncclSend", &err, "rank %d", 3),
        WSYNC_ERR_CLOSED);
    CHECK_STR(err.message,
              "rank 3: ncclSend: remote process exited or there was a network "
              "error (6)");
    CHECK_EQ(err.native, WSYNC_NCCL_REMOTE_ERROR);
    CHECK_STR(err.origin, "ncclSend");
    CHECK_EQ(nccl->group_end(), WSYNC_NCCL_INVALID_USAGE);
    CHECK_EQ(
        wsync_nccl_check(nccl, WSYNC_NCCL_INVALID_USAGE, "ncclGroupEnd", &err, "round"),
        WSYNC_ERR_DEVICE);
    CHECK_STR(err.message,
              "round: ncclGroupEnd: invalid usage (5): ncclGroupEnd without "
              "ncclGroupStart");
    CHECK_EQ(wsync_nccl_check(nccl, WSYNC_NCCL_CUDA_ERROR, "ncclSend", NULL, "round"),
             WSYNC_ERR_DEVICE);
}
