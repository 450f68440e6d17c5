/* SPDX-License-Identifier: Apache-2.0
 * wsync_layout_decode on arbitrary bytes: what is accepted encodes to what is accepted,
 * and can be merged and routed. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "core/layout/encoding.h"
#include "core/route.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes);

/* What decodes has an encoding, which decodes, too. */
static void encode_back(const wsync_layout_t *layout)
{
    uint8_t *again = NULL;
    size_t nbytes = 0;
    wsync_layout_t *same = NULL;
    wsync_error_t err;

    if (wsync_layout_encode(layout, &again, &nbytes, &err) != WSYNC_OK) {
        return; /* no memory */
    }
    if (wsync_layout_decode(again, nbytes, &same, &err) != WSYNC_OK &&
        err.status != WSYNC_ERR_NO_MEMORY) {
        __builtin_trap();
    }
    wsync_layout_destroy(same);
    free(again);
}

static void use(const wsync_layout_t *layout)
{
    const wsync_layout_t *layouts[2] = {layout, layout};
    wsync_layout_t *merged = NULL;
    wsync_error_t err;

    if (wsync_layout_merge(layouts, 2, &merged, &err) != WSYNC_OK &&
        err.status != WSYNC_ERR_NO_MEMORY) {
        __builtin_trap(); /* a layout agrees with itself */
    }
    wsync_layout_destroy(merged);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes)
{
    wsync_layout_t *layout = NULL;
    wsync_error_t err;
    const wsync_status_t status = wsync_layout_decode(data, nbytes, &layout, &err);

    if (status == WSYNC_OK) {
        encode_back(layout);
        use(layout);
        wsync_layout_destroy(layout);
    } else if (layout != NULL || err.status != status || err.message[0] == '\0') {
        __builtin_trap();
    }
    return 0;
}
