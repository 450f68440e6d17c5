/* SPDX-License-Identifier: Apache-2.0
 * A device that has no memory left for a while. */
#ifndef WSYNC_TESTS_STARVE_H
#define WSYNC_TESTS_STARVE_H

#include <signal.h>
#include <sys/resource.h>

#include "device_fixture.h"

enum { STARVE_BLOCKS = 8, STARVE_BLOCK_NBYTES = 2 << 20 };

static wsync_memory_t *starve_blocks[STARVE_BLOCKS];

/* Before the device is asked for. */
static inline void starve_prepare(void)
{
    CHECK_EQ(setenv("WSYNC_FAKE_CUDA_MEMORY", "16777216", 1), 0);
    CHECK(signal(SIGXFSZ, SIG_IGN) != SIG_ERR);
}

/* A GPU's memory is taken; on the host no file may grow. */
static inline void starve(void)
{
    const struct rlimit small = {0, RLIM_INFINITY};
    wsync_status_t status = WSYNC_OK;
    int count = 0;

    if (on_host()) {
        CHECK_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
        return;
    }
    while (status == WSYNC_OK && count < STARVE_BLOCKS) {
        status = wsync_memory_create(test_device(), STARVE_BLOCK_NBYTES,
                                     &starve_blocks[count++], NULL);
    }
    CHECK(status == WSYNC_OK || status == WSYNC_ERR_NO_MEMORY);
}

static inline void starve_no_more(void)
{
    const struct rlimit any = {RLIM_INFINITY, RLIM_INFINITY};

    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &any), 0);
    for (int i = 0; i < STARVE_BLOCKS; i++) {
        wsync_memory_destroy(starve_blocks[i]);
        starve_blocks[i] = NULL;
    }
}

#endif
