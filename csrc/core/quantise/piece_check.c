/* SPDX-License-Identifier: Apache-2.0 */
#include "core/quantise/piece_check.h"

typedef unsigned long long u64_t;

static wsync_quantise_blocks_t blocks(const wsync_quantise_piece_t *piece, int d,
                                      uint32_t size)
{
    const uint64_t first = size > 0 ? piece->start[d] / size : 0;
    const uint64_t last = size > 0 ? (piece->start[d] + piece->extent[d] - 1) / size : 0;

    return (wsync_quantise_blocks_t){first, last - first + 1};
}

wsync_quantise_blocks_t wsync_quantise_rows(const wsync_quantise_piece_t *piece)
{
    return blocks(piece, 0, piece->method.block_rows);
}

wsync_quantise_blocks_t wsync_quantise_cols(const wsync_quantise_piece_t *piece)
{
    return blocks(piece, 1, piece->method.block_cols);
}

wsync_quantise_scales_t wsync_quantise_scales(const wsync_quantise_piece_t *piece)
{
    const uint64_t in_word = wsync_quantise_scales_in_word(piece->method.kind);
    const wsync_quantise_blocks_t cols = wsync_quantise_cols(piece);
    const uint64_t first = cols.first / in_word;

    return (wsync_quantise_scales_t){
        .rows = in_word > 1 ? piece->extent[0] : wsync_quantise_rows(piece).count,
        .first = first,
        .cols = (cols.first + cols.count - 1) / in_word - first + 1,
    };
}

uint64_t wsync_quantise_words(const wsync_quantise_piece_t *piece)
{
    const uint64_t codes = wsync_quantise_codes(piece->method.kind);

    return piece->extent[1] / codes + (piece->extent[1] % codes != 0);
}

bool wsync_quantise_empty(const wsync_quantise_piece_t *piece)
{
    return piece->extent[0] == 0 || piece->extent[1] == 0;
}

static wsync_status_t fail_outside(const wsync_quantise_piece_t *piece, const char *what,
                                   const wsync_span_t *span, wsync_error_t *err)
{
    return wsync_fail(err, WSYNC_ERR_INVALID, 0, "quantise",
                      "%.256s: %s of %llu x %llu elements are not inside %llu bytes",
                      piece->tensor, what, (u64_t)piece->extent[0], (u64_t)piece->extent[1],
                      (u64_t)span->nbytes);
}

static bool is_inside(const wsync_span_t *span, uint64_t offset, uint64_t nbytes)
{
    return offset <= span->nbytes && nbytes <= span->nbytes - offset;
}

static wsync_status_t check_source(const wsync_quantise_piece_t *piece,
                                   const wsync_span_t *sources, size_t count,
                                   wsync_error_t *err)
{
    uint64_t before = 0; /* bytes before the offset, and from it on */
    uint64_t after = wsync_dtype_nbytes(piece->dtype);
    const wsync_span_t *span;

    if (piece->source_buffer >= count) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "quantise",
                          "%.256s: buffer %u is not one of the %zu that are bound",
                          piece->tensor, piece->source_buffer, count);
    }
    span = &sources[piece->source_buffer];
    for (int d = 0; d < 2; d++) {
        const int64_t stride = piece->source_stride[d];
        const uint64_t steps = piece->extent[d] - 1;

        if (stride < 0) {
            before += steps * -(uint64_t)stride;
        } else {
            after += steps * (uint64_t)stride;
        }
    }
    return before <= piece->source_offset && is_inside(span, piece->source_offset, after)
               ? WSYNC_OK
               : fail_outside(piece, "weights", span, err);
}

static wsync_status_t check_image(const wsync_quantise_piece_t *piece,
                                  const wsync_span_t *image, wsync_error_t *err)
{
    const wsync_quantise_kind_t kind = piece->method.kind;
    const wsync_quantise_scales_t scales = wsync_quantise_scales(piece);
    const uint64_t codes_nbytes =
        (piece->extent[0] - 1) * piece->codes_stride +
        wsync_quantise_words(piece) * wsync_dtype_nbytes(wsync_quantise_word(kind));
    const uint64_t scales_nbytes =
        (scales.rows - 1) * piece->scales_stride +
        scales.cols * wsync_dtype_nbytes(wsync_quantise_scale(kind, piece->dtype));

    return is_inside(image, piece->codes, codes_nbytes) &&
                   is_inside(image, piece->scales, scales_nbytes) &&
                   (piece->second == WSYNC_QUANTISE_NONE ||
                    is_inside(image, piece->second, sizeof(float)))
               ? WSYNC_OK
               : fail_outside(piece, "codes and scales", image, err);
}

/* Entries of the table as bytes of its span. */
static wsync_status_t check_amaxes(const wsync_quantise_piece_t *piece,
                                   const wsync_span_t *amaxes, wsync_error_t *err)
{
    const wsync_quantise_blocks_t rows = wsync_quantise_rows(piece);
    const wsync_quantise_blocks_t cols = wsync_quantise_cols(piece);
    const uint64_t entries = amaxes->nbytes / sizeof(float);
    /* words of scales may have all blocks of a row */
    const uint64_t row = wsync_quantise_scales_in_word(piece->method.kind) > 1
                             ? piece->grid[1]
                             : cols.first + cols.count;
    const uint64_t last =
        piece->amaxes + (rows.first + rows.count - 1) * piece->amax_stride + row;

    return (piece->amaxes == WSYNC_QUANTISE_NONE || last <= entries) &&
                   (piece->overall == WSYNC_QUANTISE_NONE || piece->overall < entries)
               ? WSYNC_OK
               : fail_outside(piece, "amaxes", amaxes, err);
}

wsync_status_t wsync_quantise_check(const wsync_quantise_piece_t *pieces, size_t count,
                                    const wsync_span_t *sources, size_t source_count,
                                    const wsync_span_t *image, const wsync_span_t *amaxes,
                                    wsync_error_t *err)
{
    wsync_status_t status = WSYNC_OK;

    for (size_t i = 0; i < count && status == WSYNC_OK; i++) {
        if (wsync_quantise_empty(&pieces[i])) {
            continue;
        }
        status = check_source(&pieces[i], sources, source_count, err);
        if (status == WSYNC_OK) {
            status = check_image(&pieces[i], image, err);
        }
        if (status == WSYNC_OK) {
            status = check_amaxes(&pieces[i], amaxes, err);
        }
    }
    return status;
}
