/* SPDX-License-Identifier: Apache-2.0 */
#include "core/layout/dtype.h"

#include <string.h>

typedef struct dtype_row {
    const char *name;
    size_t nbytes;
} dtype_row_t;

static const dtype_row_t dtype_rows[WSYNC_DTYPE_COUNT] = {
#define DTYPE_ROW(name, text, nbytes) {text, nbytes},
    WSYNC_DTYPE_MAP(DTYPE_ROW)
#undef DTYPE_ROW
};

const char *wsync_dtype_name(wsync_dtype_t dtype)
{
    return dtype_rows[dtype].name;
}

size_t wsync_dtype_nbytes(wsync_dtype_t dtype)
{
    return dtype_rows[dtype].nbytes;
}

wsync_status_t wsync_dtype_from_name(const char *name, wsync_dtype_t *dtype,
                                     wsync_error_t *err)
{
    static const char prefix[] = "torch.";
    const char *bare = name;

    if (strncmp(name, prefix, sizeof(prefix) - 1) == 0) {
        bare += sizeof(prefix) - 1;
    }
    for (int i = 0; i < WSYNC_DTYPE_COUNT; i++) {
        if (strcmp(bare, dtype_rows[i].name) == 0) {
            *dtype = (wsync_dtype_t)i;
            return WSYNC_OK;
        }
    }
    return wsync_fail(err, WSYNC_ERR_INVALID, 0, "dtype", "unknown dtype '%.64s'", name);
}

wsync_status_t wsync_dtype_transform(wsync_dtype_t source, wsync_dtype_t destination,
                                     bool computed, wsync_transform_t *transform,
                                     wsync_error_t *err)
{
    static const struct {
        wsync_dtype_t source;
        wsync_dtype_t destination;
        wsync_transform_t transform;
    } known[] = {
        {WSYNC_DTYPE_FLOAT32, WSYNC_DTYPE_BFLOAT16, WSYNC_TRANSFORM_F32_TO_BF16},
        {WSYNC_DTYPE_FLOAT32, WSYNC_DTYPE_FLOAT16, WSYNC_TRANSFORM_F32_TO_F16},
        {WSYNC_DTYPE_BFLOAT16, WSYNC_DTYPE_FLOAT32, WSYNC_TRANSFORM_BF16_TO_F32},
        {WSYNC_DTYPE_FLOAT32, WSYNC_DTYPE_FLOAT32, WSYNC_TRANSFORM_F32},
        {WSYNC_DTYPE_BFLOAT16, WSYNC_DTYPE_BFLOAT16, WSYNC_TRANSFORM_BF16},
        {WSYNC_DTYPE_FLOAT16, WSYNC_DTYPE_FLOAT16, WSYNC_TRANSFORM_F16},
    };

    *transform = WSYNC_TRANSFORM_NONE;
    if (source == destination && !computed) {
        return WSYNC_OK;
    }
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++) {
        if (known[i].source == source && known[i].destination == destination) {
            *transform = known[i].transform;
            return WSYNC_OK;
        }
    }
    return wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, "dtype",
                      "no conversion from %s to %s%s", wsync_dtype_name(source),
                      wsync_dtype_name(destination),
                      computed ? " with a scale and an offset" : "");
}
