/* SPDX-License-Identifier: Apache-2.0 */
#include "core/quantise/method.h"

#include <string.h>

typedef struct kind_row {
    const char *name;
    unsigned codes;
    wsync_dtype_t word;
    wsync_dtype_t scale;
} kind_row_t;

static const kind_row_t kinds[WSYNC_QUANTISE_COUNT] = {
#define WSYNC_QUANTISE_ROW(name, text, codes, word, scale) \
    [WSYNC_QUANTISE_##name] = {text, codes, WSYNC_DTYPE_##word, WSYNC_DTYPE_##scale},
    WSYNC_QUANTISE_MAP(WSYNC_QUANTISE_ROW)
#undef WSYNC_QUANTISE_ROW
};

wsync_status_t wsync_quantise_kind_from_name(const char *name, wsync_quantise_kind_t *kind,
                                             wsync_error_t *err)
{
    for (int i = 0; i < WSYNC_QUANTISE_COUNT; i++) {
        if (strcmp(name, kinds[i].name) == 0) {
            *kind = (wsync_quantise_kind_t)i;
            return WSYNC_OK;
        }
    }
#define WSYNC_QUANTISE_TEXT(name, text, codes, word, scale) " " text
    return wsync_fail(err, WSYNC_ERR_INVALID, 0, "quantise",
                      "no way to quantise is named '%.64s'; there are" WSYNC_QUANTISE_MAP(
                          WSYNC_QUANTISE_TEXT),
                      name);
#undef WSYNC_QUANTISE_TEXT
}

const char *wsync_quantise_kind_name(wsync_quantise_kind_t kind)
{
    return kinds[kind].name;
}

unsigned wsync_quantise_codes(wsync_quantise_kind_t kind)
{
    return kinds[kind].codes;
}

wsync_dtype_t wsync_quantise_word(wsync_quantise_kind_t kind)
{
    return kinds[kind].word;
}

wsync_dtype_t wsync_quantise_scale(wsync_quantise_kind_t kind, wsync_dtype_t weights)
{
    return kinds[kind].scale == WSYNC_DTYPE_COUNT ? weights : kinds[kind].scale;
}

unsigned wsync_quantise_scales_in_word(wsync_quantise_kind_t kind)
{
    return kind == WSYNC_QUANTISE_FP8_PACKED ? 4 : 1;
}
