/* SPDX-License-Identifier: Apache-2.0
 * "WSLY" and one byte of version, then numbers as LEB128 varints (strides zigzag) and texts
 * as their length and UTF-8 bytes:
 *
 *   tensor count, for each: dtype name, ndim, group, shape[ndim], name
 *   origin count, for each: name
 *   for each tensor: shard count, for each: rank, buffer, origin, offset, the bits of scale
 *                    and of offset, ndim times (start, extent, step - 1 if extent > 1,
 *                    stride) */
#include "core/layout/encoding.h"

#include <stdlib.h>
#include <string.h>

#include "core/base/array.h"
#include "core/layout/layout_parts.h"

static const uint8_t wire_magic[4] = {'W', 'S', 'L', 'Y'};

enum { VERSION = 3, VARINT_MAX_NBYTES = 10 };

typedef struct writer {
    WSYNC_ARRAY(uint8_t) bytes;
    bool failed;
} writer_t;

static void write_bytes(writer_t *writer, const void *data, size_t nbytes)
{
    writer->failed = writer->failed || !WSYNC_ARRAY_RESERVE(writer->bytes, nbytes);
    if (!writer->failed) {
        memcpy(writer->bytes.items + writer->bytes.count, data, nbytes);
        writer->bytes.count += nbytes;
    }
}

static void write_number(writer_t *writer, uint64_t value)
{
    uint8_t bytes[VARINT_MAX_NBYTES];
    size_t count = 0;

    while (value >= 0x80) {
        bytes[count++] = (uint8_t)(value | 0x80);
        value >>= 7;
    }
    bytes[count++] = (uint8_t)value;
    write_bytes(writer, bytes, count);
}

static void write_signed(writer_t *writer, int64_t value)
{
    write_number(writer, value < 0 ? ~((uint64_t)value << 1) : (uint64_t)value << 1);
}

static void write_text(writer_t *writer, const char *text)
{
    const size_t nbytes = strlen(text);

    write_number(writer, nbytes);
    write_bytes(writer, text, nbytes);
}

static void write_tensor(writer_t *writer, const wsync_tensor_t *tensor)
{
    write_text(writer, wsync_dtype_name(tensor->dtype));
    write_number(writer, tensor->ndim);
    write_number(writer, tensor->group);
    for (unsigned i = 0; i < tensor->ndim; i++) {
        write_number(writer, (uint64_t)tensor->shape[i]);
    }
    write_text(writer, tensor->name);
}

static void write_shard(writer_t *writer, const wsync_shard_t *shard, unsigned ndim)
{
    uint32_t affine[2];

    memcpy(affine, &shard->affine, sizeof(affine));
    write_number(writer, shard->rank);
    write_number(writer, shard->buffer);
    write_number(writer, shard->origin);
    write_number(writer, shard->offset);
    write_number(writer, affine[0]);
    write_number(writer, affine[1]);
    for (unsigned i = 0; i < ndim; i++) {
        write_number(writer, (uint64_t)shard->box.start[i]);
        write_number(writer, (uint64_t)shard->box.extent[i]);
        if (shard->box.extent[i] > 1) {
            write_number(writer, shard->step[i] - 1U);
        }
        write_signed(writer, shard->stride[i]);
    }
}

wsync_status_t wsync_layout_encode(const wsync_layout_t *layout, uint8_t **data,
                                   size_t *nbytes, wsync_error_t *err)
{
    const size_t tensor_count = wsync_layout_tensor_count(layout);
    const size_t origin_count = wsync_layout_origin_count(layout);
    writer_t writer = {0};

    write_bytes(&writer, wire_magic, sizeof(wire_magic));
    write_number(&writer, VERSION);
    write_number(&writer, tensor_count);
    for (size_t i = 0; i < tensor_count; i++) {
        write_tensor(&writer, wsync_layout_tensor(layout, i));
    }
    write_number(&writer, origin_count);
    for (size_t i = 0; i < origin_count; i++) {
        write_text(&writer, wsync_layout_origin(layout, (uint32_t)i));
    }
    for (size_t i = 0; i < tensor_count; i++) {
        size_t count;
        const wsync_shard_t *shards = wsync_layout_shards(layout, i, &count);

        write_number(&writer, count);
        for (size_t j = 0; j < count; j++) {
            write_shard(&writer, &shards[j], wsync_layout_tensor(layout, i)->ndim);
        }
    }
    if (writer.failed) {
        free(writer.bytes.items);
        return wsync_no_memory(err, "wire");
    }
    *data = writer.bytes.items;
    *nbytes = writer.bytes.count;
    return WSYNC_OK;
}

/* After the first failure, which status tells, reads do nothing and give 0 or "". */
typedef struct reader {
    const uint8_t *data;
    size_t nbytes;
    size_t at;
    char *text; /* scratch for one text and its end */
    size_t text_capacity;
    wsync_status_t status;
    wsync_error_t *err;
} reader_t;

static uint64_t read_number(reader_t *reader, const char *what, uint64_t limit)
{
    const size_t start = reader->at;
    uint64_t number = 0;
    uint8_t byte = 0x80;

    for (unsigned i = 0; byte >= 0x80 && reader->status == WSYNC_OK; i++) {
        if (reader->at == reader->nbytes) {
            reader->status =
                wsync_fail(reader->err, WSYNC_ERR_PROTOCOL, 0, "wire",
                           "byte %zu: the layout ends inside a %s", reader->at, what);
            break;
        }
        byte = reader->data[reader->at++];
        if (i == VARINT_MAX_NBYTES - 1 && byte > 1) {
            reader->status =
                wsync_fail(reader->err, WSYNC_ERR_PROTOCOL, 0, "wire",
                           "byte %zu: with 0x%02x here, the %s exceeds 64 bits",
                           reader->at - 1, byte, what);
        }
        number |= (uint64_t)(byte & 0x7f) << (7 * i);
    }
    if (reader->status == WSYNC_OK && number > limit) {
        reader->status = wsync_fail(reader->err, WSYNC_ERR_PROTOCOL, 0, "wire",
                                    "byte %zu: %s %llu exceeds %llu", start, what,
                                    (unsigned long long)number, (unsigned long long)limit);
    }
    return reader->status == WSYNC_OK ? number : 0;
}

static int64_t read_signed(reader_t *reader, const char *what)
{
    const uint64_t number = read_number(reader, what, UINT64_MAX);
    const int64_t half = (int64_t)(number >> 1);

    return (number & 1) != 0 ? -half - 1 : half;
}

/* A text that is valid until the next one is read. */
static const char *read_text(reader_t *reader, const char *what)
{
    const size_t nbytes = (size_t)read_number(reader, what, UINT32_MAX);
    char *text;

    if (reader->status != WSYNC_OK) {
        return "";
    }
    if (nbytes > reader->nbytes - reader->at) {
        reader->status = wsync_fail(reader->err, WSYNC_ERR_PROTOCOL, 0, "wire",
                                    "byte %zu: a %s of %zu bytes where %zu are left",
                                    reader->at, what, nbytes, reader->nbytes - reader->at);
        return "";
    }
    text = wsync_array_reserve(reader->text, &reader->text_capacity, nbytes + 1, 1);
    if (text == NULL) {
        reader->status = wsync_no_memory(reader->err, "wire");
        return "";
    }
    reader->text = text;
    memcpy(text, reader->data + reader->at, nbytes);
    text[nbytes] = '\0';
    reader->at += nbytes;
    return text;
}

/* Notes what the builder made of the part that starts at `at`: what it refuses is malformed
 * here. */
static void note_built(reader_t *reader, size_t at, wsync_status_t status)
{
    const bool malformed = status != WSYNC_OK && status != WSYNC_ERR_NO_MEMORY;

    reader->status = malformed ? WSYNC_ERR_PROTOCOL : status;
    if (malformed && reader->err != NULL) {
        const wsync_error_t cause = *reader->err;

        (void)wsync_fail(reader->err, WSYNC_ERR_PROTOCOL, 0, "wire", "byte %zu: %.700s", at,
                         cause.message);
    }
}

static void read_tensor(reader_t *reader, wsync_layout_builder_t *builder,
                        uint32_t expected)
{
    const size_t start = reader->at;
    const char *dtype = read_text(reader, "dtype name");
    wsync_tensor_t tensor = {0};
    uint32_t index = 0;

    if (reader->status == WSYNC_OK) {
        note_built(reader, start, wsync_dtype_from_name(dtype, &tensor.dtype, reader->err));
    }
    tensor.ndim = (uint32_t)read_number(reader, "number of dimensions", WSYNC_MAX_NDIM);
    tensor.group = (uint32_t)read_number(reader, "group", UINT32_MAX);
    for (unsigned i = 0; i < tensor.ndim; i++) {
        tensor.shape[i] = (int64_t)read_number(reader, "shape", INT64_MAX);
    }
    tensor.name = read_text(reader, "tensor name");
    if (reader->status == WSYNC_OK) {
        note_built(reader, start,
                   wsync_layout_builder_tensor(builder, &tensor, &index, reader->err));
    }
    if (reader->status == WSYNC_OK && index != expected) {
        reader->status =
            wsync_fail(reader->err, WSYNC_ERR_PROTOCOL, 0, "wire",
                       "byte %zu: tensor '%.256s' appears twice", start, reader->text);
    }
}

static void read_origin(reader_t *reader, wsync_layout_builder_t *builder)
{
    const char *name = read_text(reader, "origin name");
    uint32_t index = 0;

    if (reader->status == WSYNC_OK) {
        reader->status = wsync_layout_builder_origin(builder, name, &index, reader->err);
    }
}

static void read_shard(reader_t *reader, wsync_layout_builder_t *builder, uint32_t tensor,
                       unsigned ndim)
{
    const size_t start = reader->at;
    wsync_shard_t shard = {.tensor = tensor, .box = wsync_box_whole(0, NULL)};
    uint32_t affine[2] = {0};

    shard.rank = (uint32_t)read_number(reader, "rank", WSYNC_MAX_RANKS - 1);
    shard.buffer = (uint32_t)read_number(reader, "buffer", UINT32_MAX - 1);
    shard.origin = (uint32_t)read_number(reader, "origin", UINT32_MAX);
    shard.offset = read_number(reader, "offset", INT64_MAX);
    for (unsigned i = 0; i < 2; i++) {
        affine[i] = (uint32_t)read_number(reader, "scale or offset", UINT32_MAX);
    }
    memcpy(&shard.affine, affine, sizeof(affine));
    for (unsigned i = 0; i < ndim; i++) {
        shard.box.start[i] = (int64_t)read_number(reader, "start", INT64_MAX);
        shard.box.extent[i] = (int64_t)read_number(reader, "extent", INT64_MAX);
        if (shard.box.extent[i] > 1) {
            shard.step[i] = 1 + (uint32_t)read_number(reader, "step", UINT32_MAX - 1);
        }
        shard.stride[i] = read_signed(reader, "stride");
    }
    if (reader->status == WSYNC_OK) {
        note_built(reader, start, wsync_layout_builder_shard(builder, &shard, reader->err));
    }
}

/* Counts are not trusted with memory: every item takes bytes of its own, and what is made
 * of it grows as it is read. */
static void read_layout(reader_t *reader, wsync_layout_builder_t *builder)
{
    const uint64_t tensor_count = read_number(reader, "tensor count", UINT32_MAX);
    uint64_t count;

    for (uint64_t i = 0; i < tensor_count && reader->status == WSYNC_OK; i++) {
        read_tensor(reader, builder, (uint32_t)i);
    }
    count = read_number(reader, "origin count", UINT32_MAX);
    for (uint64_t i = 0; i < count && reader->status == WSYNC_OK; i++) {
        read_origin(reader, builder);
    }
    for (uint64_t i = 0; i < tensor_count && reader->status == WSYNC_OK; i++) {
        const unsigned ndim = wsync_layout_builder_peek(builder, (uint32_t)i)->ndim;

        count = read_number(reader, "shard count", UINT32_MAX);
        for (uint64_t j = 0; j < count && reader->status == WSYNC_OK; j++) {
            read_shard(reader, builder, (uint32_t)i, ndim);
        }
    }
    if (reader->status == WSYNC_OK && reader->at != reader->nbytes) {
        reader->status = wsync_fail(reader->err, WSYNC_ERR_PROTOCOL, 0, "wire",
                                    "byte %zu: %zu bytes follow the layout", reader->at,
                                    reader->nbytes - reader->at);
    }
}

wsync_status_t wsync_layout_decode(const uint8_t *data, size_t nbytes,
                                   wsync_layout_t **layout, wsync_error_t *err)
{
    reader_t reader = {.data = data, .nbytes = nbytes, .err = err};
    wsync_layout_builder_t *builder = NULL;
    wsync_status_t status;

    for (; reader.at < sizeof(wire_magic); reader.at++) {
        if (reader.at == nbytes || data[reader.at] != wire_magic[reader.at]) {
            return wsync_fail(err, WSYNC_ERR_PROTOCOL, 0, "wire", "byte %zu: not a layout",
                              reader.at);
        }
    }
    if (read_number(&reader, "version", UINT8_MAX) != VERSION &&
        reader.status == WSYNC_OK) {
        return wsync_fail(err, WSYNC_ERR_PROTOCOL, 0, "wire",
                          "byte %zu: a layout of another version than %d",
                          sizeof(wire_magic), VERSION);
    }
    status = reader.status == WSYNC_OK ? wsync_layout_builder_create(&builder, err)
                                       : reader.status;
    if (status == WSYNC_OK) {
        read_layout(&reader, builder);
        status = reader.status;
    }
    if (status == WSYNC_OK) {
        status = wsync_layout_builder_finish(builder, layout, err);
    }
    wsync_layout_builder_destroy(builder);
    free(reader.text);
    return status;
}
