/* SPDX-License-Identifier: Apache-2.0
 * Tests that every device backend passes.  WSYNC_TEST_DEVICE picks one: "host", or "cuda"
 * on tests/fakecuda, where the processor reaches the bytes by reach() alone. */
#ifndef WSYNC_TESTS_DEVICE_FIXTURE_H
#define WSYNC_TESTS_DEVICE_FIXTURE_H

#include <string.h>

#include "device/cuda.h"
#include "device/device.h"
#include "fake_reach.h"
#include "harness.h"

static inline bool on_host(void)
{
    const char *name = getenv("WSYNC_TEST_DEVICE");

    return name == NULL || strcmp(name, "host") == 0;
}

static inline const wsync_device_t *test_device(void)
{
    const wsync_device_t *device = NULL;
    wsync_cu_uuid_t uuid;
    wsync_error_t err = {0};

    if (on_host()) {
        return wsync_device_host();
    }
    CHECK_EQ(setenv("WSYNC_CUDA_LIB", FAKECUDA_PATH, 1), 0);
    memset(uuid.bytes, 0xfa, sizeof(uuid.bytes)); /* the fake's first GPU */
    uuid.bytes[15] = 0;
    CHECK_OK(wsync_device_cuda(&uuid, "kernels", &device, &err), err);
    return device;
}

#endif
