/* SPDX-License-Identifier: Apache-2.0 */
#include "core/quantise/piece_check.h"

#include <inttypes.h>

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

/* Whether an index begins a block. */
static bool begins(uint64_t index, uint32_t block)
{
    return (block > 0 ? index % block : index) == 0;
}

static wsync_status_t check_kind(const wsync_quantise_piece_t *piece, wsync_error_t *err)
{
    const wsync_quantise_method_t *method = &piece->method;
    uint64_t end;
    uint64_t codes;

    if ((unsigned)method->kind >= WSYNC_QUANTISE_COUNT) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "quantise",
                          "%.256s: no way to quantise has the number %d", piece->tensor,
                          (int)method->kind);
    }
    if (piece->dtype != WSYNC_DTYPE_FLOAT32 && piece->dtype != WSYNC_DTYPE_BFLOAT16 &&
        piece->dtype != WSYNC_DTYPE_FLOAT16) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "quantise",
                          "%.256s: elements of dtype number %d are not quantised: only "
                          "float32, bfloat16 and float16 are",
                          piece->tensor, (int)piece->dtype);
    }
    for (int d = 0; d < 2; d++) {
        if (__builtin_add_overflow(piece->start[d], piece->extent[d], &end)) {
            return wsync_fail(err, WSYNC_ERR_INVALID, 0, "quantise",
                              "%.256s: dim %d: start %llu plus extent %llu is no index",
                              piece->tensor, d, (u64_t)piece->start[d],
                              (u64_t)piece->extent[d]);
        }
    }
    codes = wsync_quantise_codes(method->kind);
    if (piece->start[1] % codes != 0 || method->block_cols % codes != 0) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "quantise",
                          "%.256s: its first column %llu and blocks of %u columns are "
                          "not multiples of the %llu codes in a word",
                          piece->tensor, (u64_t)piece->start[1], method->block_cols,
                          (u64_t)codes);
    }
    if (piece->amaxes == WSYNC_QUANTISE_NONE &&
        !(begins(piece->start[0], method->block_rows) &&
          begins(piece->start[1], method->block_cols))) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "quantise",
                          "%.256s: begins at %llu, %llu inside a block of %u x %u, and "
                          "has no entries of amaxes",
                          piece->tensor, (u64_t)piece->start[0], (u64_t)piece->start[1],
                          method->block_rows, method->block_cols);
    }
    if (method->kind == WSYNC_QUANTISE_NVFP4 && piece->overall == WSYNC_QUANTISE_NONE) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "quantise",
                          "%.256s: nvfp4 needs the amaxes of all that shares the "
                          "second scale",
                          piece->tensor);
    }
    return WSYNC_OK;
}

/* Of words that several blocks share. */
static wsync_status_t check_words(const wsync_quantise_piece_t *piece, wsync_error_t *err)
{
    const wsync_quantise_method_t *method = &piece->method;
    const uint64_t in_word = wsync_quantise_scales_in_word(method->kind);
    wsync_quantise_blocks_t range;
    uint64_t end;

    if (in_word == 1) {
        return WSYNC_OK;
    }
    if (method->block_rows == 0 || method->block_cols == 0) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "quantise",
                          "%.256s: %s has no blocks of %u x %u", piece->tensor,
                          wsync_quantise_kind_name(method->kind), method->block_rows,
                          method->block_cols);
    }
    for (int d = 0; d < 2; d++) {
        range = d == 0 ? wsync_quantise_rows(piece) : wsync_quantise_cols(piece);
        end = range.first + range.count;
        if (end > piece->grid[d]) {
            return wsync_fail(err, WSYNC_ERR_INVALID, 0, "quantise",
                              "%.256s: dim %d: block %llu is not one of the tensor's "
                              "%llu",
                              piece->tensor, d, (u64_t)(end - 1), (u64_t)piece->grid[d]);
        }
    }
    if (piece->amaxes == WSYNC_QUANTISE_NONE &&
        (range.first % in_word != 0 || (end % in_word != 0 && end != piece->grid[1]))) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "quantise",
                          "%.256s: dim 1: blocks %llu to %llu of %llu cut a word of "
                          "%llu, and there are no entries of amaxes",
                          piece->tensor, (u64_t)range.first, (u64_t)end,
                          (u64_t)piece->grid[1], (u64_t)in_word);
    }
    return WSYNC_OK;
}

static wsync_status_t check_source(const wsync_quantise_piece_t *piece,
                                   const wsync_span_t *sources, size_t count,
                                   wsync_error_t *err)
{
    const uint64_t item = wsync_dtype_nbytes(piece->dtype);
    const wsync_span_t *span;
    uint64_t reach[2] = {0, item}; /* bytes before the offset, and from it on */
    uint64_t unaligned;
    uint64_t end;

    if (piece->source_buffer >= count) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "quantise",
                          "%.256s: buffer %u is not one of the %zu that are bound",
                          piece->tensor, piece->source_buffer, count);
    }
    span = &sources[piece->source_buffer];
    unaligned = (uint64_t)(uintptr_t)span->data + piece->source_offset;
    for (int d = 0; d < 2; d++) {
        const int64_t stride = piece->source_stride[d];
        const uint64_t size = stride < 0 ? -(uint64_t)stride : (uint64_t)stride;
        uint64_t *way = &reach[stride < 0 ? 0 : 1];
        uint64_t steps;

        unaligned |= size;
        if (__builtin_mul_overflow(piece->extent[d] - 1, size, &steps) ||
            __builtin_add_overflow(*way, steps, way)) {
            return wsync_fail(err, WSYNC_ERR_INVALID, 0, "quantise",
                              "%.256s: buffer %u: extent %llu times stride %lld is no "
                              "address",
                              piece->tensor, piece->source_buffer, (u64_t)piece->extent[d],
                              (long long)stride);
        }
    }
    if (reach[0] > piece->source_offset ||
        __builtin_add_overflow(piece->source_offset, reach[1], &end) ||
        end > span->nbytes) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "quantise",
                          "%.256s: buffer %u: bytes [%llu - %llu, %llu + %llu) are not "
                          "inside its %llu bytes",
                          piece->tensor, piece->source_buffer, (u64_t)piece->source_offset,
                          (u64_t)reach[0], (u64_t)piece->source_offset, (u64_t)reach[1],
                          (u64_t)span->nbytes);
    }
    if (unaligned % item != 0) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "quantise",
                          "%.256s: buffer %u: offset %llu or strides %lld, %lld are not "
                          "aligned to elements of %llu bytes",
                          piece->tensor, piece->source_buffer, (u64_t)piece->source_offset,
                          (long long)piece->source_stride[0],
                          (long long)piece->source_stride[1], (u64_t)item);
    }
    return WSYNC_OK;
}

/* Rows of `item` bytes each in a span. */
typedef struct rows {
    const char *name;
    uint64_t offset;
    uint64_t stride;
    uint64_t count;
    uint64_t row_items;
    uint64_t item;
} rows_t;

static wsync_status_t check_rows(const wsync_quantise_piece_t *piece, const rows_t *rows,
                                 const wsync_span_t *span, wsync_error_t *err)
{
    uint64_t row_nbytes;
    uint64_t steps;
    uint64_t end;

    if (__builtin_mul_overflow(rows->row_items, rows->item, &row_nbytes) ||
        __builtin_mul_overflow(rows->count - 1, rows->stride, &steps) ||
        __builtin_add_overflow(rows->offset, steps, &end) ||
        __builtin_add_overflow(end, row_nbytes, &end) || end > span->nbytes) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "quantise",
                          "%.256s: %s: %llu rows of %llu times %llu bytes, %llu bytes "
                          "apart, from offset %llu on, are not inside %llu bytes",
                          piece->tensor, rows->name, (u64_t)rows->count,
                          (u64_t)rows->row_items, (u64_t)rows->item, (u64_t)rows->stride,
                          (u64_t)rows->offset, (u64_t)span->nbytes);
    }
    if (rows->count > 1 && rows->stride < row_nbytes) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "quantise",
                          "%.256s: %s: rows of %llu bytes are %llu bytes apart",
                          piece->tensor, rows->name, (u64_t)row_nbytes,
                          (u64_t)rows->stride);
    }
    if (((uint64_t)(uintptr_t)span->data + rows->offset) % rows->item != 0 ||
        (rows->count > 1 && rows->stride % rows->item != 0)) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "quantise",
                          "%.256s: %s: offset %llu or stride %llu is not aligned to "
                          "items of %llu bytes",
                          piece->tensor, rows->name, (u64_t)rows->offset,
                          (u64_t)rows->stride, (u64_t)rows->item);
    }
    return WSYNC_OK;
}

static wsync_status_t check_image(const wsync_quantise_piece_t *piece,
                                  const wsync_span_t *image, wsync_error_t *err)
{
    const wsync_quantise_kind_t kind = piece->method.kind;
    const wsync_quantise_scales_t scales = wsync_quantise_scales(piece);
    const rows_t parts[] = {
        {"codes", piece->codes, piece->codes_stride, piece->extent[0],
         wsync_quantise_words(piece), wsync_dtype_nbytes(wsync_quantise_word(kind))},
        {"scales", piece->scales, piece->scales_stride, scales.rows, scales.cols,
         wsync_dtype_nbytes(wsync_quantise_scale(kind, piece->dtype))},
        {"the second scale", piece->second, 0, 1, 1, sizeof(float)},
    };
    const size_t count = piece->second != WSYNC_QUANTISE_NONE ? 3 : 2;
    wsync_status_t status = WSYNC_OK;

    for (size_t i = 0; i < count && status == WSYNC_OK; i++) {
        status = check_rows(piece, &parts[i], image, err);
    }
    return status;
}

/* Entries of the table as bytes of its span. */
static wsync_status_t check_amaxes(const wsync_quantise_piece_t *piece,
                                   const wsync_span_t *amaxes, wsync_error_t *err)
{
    const wsync_quantise_blocks_t rows = wsync_quantise_rows(piece);
    wsync_quantise_blocks_t cols = wsync_quantise_cols(piece);
    const uint64_t entries = amaxes->nbytes / sizeof(float);
    uint64_t last = piece->amaxes;
    uint64_t steps;

    if (wsync_quantise_scales_in_word(piece->method.kind) > 1) {
        cols.count = piece->grid[1] - cols.first; /* words may have all of them */
    }
    if (piece->amaxes != WSYNC_QUANTISE_NONE &&
        (__builtin_mul_overflow(rows.first + rows.count - 1, piece->amax_stride, &steps) ||
         __builtin_add_overflow(last, steps, &last) ||
         __builtin_add_overflow(last, cols.first + cols.count - 1, &last) ||
         last >= entries)) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "quantise",
                          "%.256s: amaxes: entry %llu + %llu * %llu + %llu is not one "
                          "of the %llu",
                          piece->tensor, (u64_t)piece->amaxes,
                          (u64_t)(rows.first + rows.count - 1), (u64_t)piece->amax_stride,
                          (u64_t)(cols.first + cols.count - 1), (u64_t)entries);
    }
    if (piece->overall != WSYNC_QUANTISE_NONE && piece->overall >= entries) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "quantise",
                          "%.256s: amaxes: entry %llu of all is not one of the %llu",
                          piece->tensor, (u64_t)piece->overall, (u64_t)entries);
    }
    if ((uintptr_t)amaxes->data % sizeof(float) != 0) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "quantise",
                          "amaxes: a table at an address that is not aligned to floats");
    }
    return WSYNC_OK;
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
        status = check_kind(&pieces[i], err);
        if (status == WSYNC_OK) {
            status = check_words(&pieces[i], err);
        }
        if (status == WSYNC_OK) {
            status = check_source(&pieces[i], sources, source_count, err);
        }
        if (status == WSYNC_OK) {
            status = check_image(&pieces[i], image, err);
        }
        if (status == WSYNC_OK) {
            status = check_amaxes(&pieces[i], amaxes, err);
        }
    }
    return status;
}
