/* SPDX-License-Identifier: Apache-2.0
 * The copy kernel.  It is compiled by NVRTC and, with tests/c/kernel_host.c in place of the
 * device, as C11: no headers, no templates, and threads that run one after another.
 *
 * Every warp takes tiles of its own, finds a tile's segment and moves the tile in the
 * widest units that all its addresses allow.  A warp waits for nobody, and 32 warps on a
 * multiprocessor with four 16-byte loads each keep 64 KiB under way. */
#ifdef __CUDACC__
#define DEVICE static __device__ __forceinline__
#define KERNEL                                                       \
    extern "C" __global__ void __launch_bounds__(WSYNC_KERNEL_BLOCK, \
                                                 WSYNC_KERNEL_BLOCKS_PER_SM)
#define ALIGNED(nbytes) __align__(nbytes)
#define MAY_ALIAS
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")
/* Addresses of device memory: the compiler need not allow for shared and local memory. */
#define GLOBAL(address) __cvta_global_to_generic(address)
/* Tables do not change while a launch runs: no store can alias them. */
#define TABLE(field) __ldg(&(field))
#endif

#include "device/kernel_table.h"

typedef unsigned char u8_t;
typedef unsigned short MAY_ALIAS u16_t;
typedef unsigned int MAY_ALIAS u32_t;
typedef unsigned long long MAY_ALIAS u64_t;
typedef struct ALIGNED(8) MAY_ALIAS vec8 {
    unsigned x, y;
} vec8_t;
typedef struct ALIGNED(16) MAY_ALIAS vec16 {
    unsigned x, y, z, w;
} vec16_t;

enum {
    WARP = WSYNC_KERNEL_WARP,
    /* Loads that a thread has under way. */
    DEPTH = 4,
    /* Rows that are not aligned move as runs from here on, below in narrow units. */
    RUN_MIN_NBYTES = 1024,
    /* Runs below this have no whole vectors for sure. */
    VECTORS_MIN_NBYTES = 64,
};

/* One tile on its way.  Either `count` items of one row, from source to destination on; or
 * rows from `row` on, with source and destination those of the segment. */
typedef struct tile {
    const wsync_segment_t *segment;
    const u8_t *source;
    u8_t *destination;
    unsigned row;
    unsigned count;     /* items */
    unsigned rows;      /* 0: of one row */
    unsigned row_count; /* items of each of `rows` rows, or, if that is 0, of the piece */
} tile_t;

/* A tile whose rows lie at equal distances, so that what its units need is in
 * registers. */
typedef struct lines {
    const u8_t *source;
    u8_t *destination;
    int source_step; /* bytes from row to row */
    int destination_step;
    unsigned row_count; /* items of a row; 0: of a tile of one row */
    unsigned magic;     /* of the division by it */
    unsigned shift;
    unsigned count; /* items */
} lines_t;

/* 16 bytes that are read once: they do not push the tables out of the first-level cache. */
DEVICE vec16_t load_once(const u8_t *from)
{
    vec16_t value;

#if !defined(__CUDACC__)
    value = *(const vec16_t *)(const void *)from;
#elif __CUDACC_VER_MAJOR__ >= 12
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
        : "l"(from));
#else
    asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
        : "l"(from));
#endif
    return value;
}

/* The same where all of the 128 bytes around them will be read: memory gives them at once.
 */
DEVICE vec16_t load_line(const u8_t *from)
{
#if defined(__CUDACC__) && __CUDACC_VER_MAJOR__ >= 12
    vec16_t value;

    asm("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
        : "l"(from));
    return value;
#else
    return load_once(from);
#endif
}

DEVICE unsigned at_most(unsigned value, unsigned limit)
{
    return value < limit ? value : limit;
}

DEVICE unsigned low_bits(const void *address)
{
    return (unsigned)(unsigned long long)address;
}

DEVICE unsigned quotient(unsigned value, unsigned magic, unsigned shift)
{
    const unsigned high = (unsigned)((unsigned long long)value * magic >> 32);

    return (high + value) >> shift;
}

DEVICE unsigned divide(unsigned value, const wsync_divisor_t *by)
{
    return quotient(value, TABLE(by->magic), TABLE(by->shift));
}

/* Steps both sides from row 0 of the segment to row number `row`. */
DEVICE void seek(const wsync_segment_t *segment, unsigned row, const u8_t **source,
                 u8_t **destination)
{
    const unsigned ndim = TABLE(segment->ndim);

    /* A loop: unrolled in every caller it takes the registers of the loads under way. */
    NO_UNROLL for (unsigned d = 0; d < ndim; d++)
    {
        unsigned index = row;

        if (d + 1 < ndim) {
            row = divide(index, &segment->extent[d]);
            index -= row * TABLE(segment->extent[d].value);
        }
        *source += (long long)index * TABLE(segment->source_stride[d]);
        *destination += (long long)index * TABLE(segment->destination_stride[d]);
    }
}

/* index * step, which 32 bits may not hold. */
DEVICE long long distance(unsigned index, int step)
{
    long long nbytes;

#ifdef __CUDACC__
    /* One instruction, with the sum; without it the compiler multiplies 64 by 64 bits. */
    asm("mul.wide.s32 %0, %1, %2;" : "=l"(nbytes) : "r"(index), "r"(step));
#else
    nbytes = (long long)(int)index * step;
#endif
    return nbytes;
}

/* Where item number `item` of a tile lies on both sides. */
DEVICE void locate(const tile_t *tile, unsigned item, unsigned source_nbytes,
                   unsigned destination_nbytes, const u8_t **source, u8_t **destination)
{
    const wsync_segment_t *segment = tile->segment;
    unsigned column = item;

    *source = tile->source;
    *destination = tile->destination;
    if (tile->rows > 0) {
        const unsigned row = divide(item, &segment->row);

        column -= row * TABLE(segment->row.value);
        seek(segment, tile->row + row, source, destination);
    }
    *source += column * source_nbytes;
    *destination += column * destination_nbytes;
}

/* The same of lines. */
DEVICE void locate_in_lines(const lines_t *lines, unsigned item, unsigned source_nbytes,
                            unsigned destination_nbytes, const u8_t **source,
                            u8_t **destination)
{
    const unsigned row = quotient(item, lines->magic, lines->shift);
    const unsigned column = item - row * lines->row_count;

    *source = lines->source + distance(row, lines->source_step) + column * source_nbytes;
    *destination = lines->destination + distance(row, lines->destination_step) +
                   column * destination_nbytes;
}

/* Describes the tile as lines; 0 where its rows do not lie at equal distances. */
DEVICE unsigned make_lines(const tile_t *tile, lines_t *lines)
{
    const wsync_segment_t *segment = tile->segment;
    const long long source_step = tile->rows > 1 ? TABLE(segment->source_stride[0]) : 0;
    const long long destination_step =
        tile->rows > 1 ? TABLE(segment->destination_stride[0]) : 0;

    lines->source = tile->source;
    lines->destination = tile->destination;
    lines->source_step = (int)source_step;
    lines->destination_step = (int)destination_step;
    lines->row_count = TABLE(segment->row.value);
    lines->magic = TABLE(segment->row.magic);
    lines->shift = TABLE(segment->row.shift);
    lines->count = tile->count;
    if (tile->rows > 0) {
        seek(segment, tile->row, &lines->source, &lines->destination);
    }
    if (tile->rows > 1 && TABLE(segment->ndim) > 1) {
        const unsigned extent = TABLE(segment->extent[0].value);
        const unsigned first = tile->row - divide(tile->row, &segment->extent[0]) * extent;

        if (first + tile->rows > extent) {
            return 0;
        }
    }
    return lines->source_step == source_step && lines->destination_step == destination_step;
}

DEVICE unsigned cast(unsigned kind, unsigned bits)
{
    return kind == WSYNC_SEGMENT_F32_TO_BF16 ? wsync_bf16_from_f32(bits)
                                             : wsync_f16_from_f32(bits);
}

DEVICE vec8_t narrow(unsigned kind, vec16_t value)
{
    vec8_t result;

    result.x = cast(kind, value.x) | cast(kind, value.y) << 16;
    result.y = cast(kind, value.z) | cast(kind, value.w) << 16;
    return result;
}

DEVICE vec16_t widen(unsigned kind, vec8_t value)
{
    vec16_t result;

    (void)kind;
    result.x = value.x << 16;
    result.y = value.x & 0xffff0000U;
    result.z = value.y << 16;
    result.w = value.y & 0xffff0000U;
    return result;
}

#define LOAD_PLAIN(type, from) (*(const type *)(const void *)(from))
#define LOAD_ONCE(type, from) load_once(from)
#define LOAD_LINE(type, from) load_line(from)
#define SAME(kind, value) (value)

/* Moves units of `items` items each, which do not cross rows: `rows` is a tile or lines,
 * and `find` says where an item of it lies.  All loads of a step are under way at once:
 * lanes that have no unit any more load the last one, and store nothing. */
#define UNITS_FUNCTION(name, rows_t, find, source_t, destination_t, items, load, change) \
    DEVICE void name(const rows_t *rows, unsigned kind, unsigned lane)                   \
    {                                                                                    \
        const unsigned count = rows->count;                                              \
                                                                                         \
        (void)kind;                                                                      \
        NO_UNROLL for (unsigned i = lane * (items); i < count;                           \
                       i += DEPTH * WARP * (items))                                      \
        {                                                                                \
            source_t value[DEPTH];                                                       \
            u8_t *to[DEPTH];                                                             \
                                                                                         \
            UNROLL for (unsigned k = 0; k < DEPTH; k++)                                  \
            {                                                                            \
                const u8_t *from;                                                        \
                                                                                         \
                find(rows, at_most(i + k * WARP * (items), count - (items)),             \
                     (unsigned)sizeof(source_t) / (items),                               \
                     (unsigned)sizeof(destination_t) / (items), &from, &to[k]);          \
                value[k] = load(source_t, from);                                         \
            }                                                                            \
            UNROLL for (unsigned k = 0; k < DEPTH; k++)                                  \
            {                                                                            \
                if (i + k * WARP * (items) < count) {                                    \
                    *(destination_t *)(void *)to[k] = change(kind, value[k]);            \
                }                                                                        \
            }                                                                            \
        }                                                                                \
    }

#define LINES_FUNCTION(name, ...) \
    UNITS_FUNCTION(name, lines_t, locate_in_lines, __VA_ARGS__)
#define TILE_FUNCTION(name, ...) UNITS_FUNCTION(name, tile_t, locate, __VA_ARGS__)

LINES_FUNCTION(copy_lines_1, u8_t, u8_t, 1U, LOAD_PLAIN, SAME)
LINES_FUNCTION(copy_lines_2, u16_t, u16_t, 2U, LOAD_PLAIN, SAME)
LINES_FUNCTION(copy_lines_4, u32_t, u32_t, 4U, LOAD_PLAIN, SAME)
LINES_FUNCTION(copy_lines_8, u64_t, u64_t, 8U, LOAD_PLAIN, SAME)
LINES_FUNCTION(copy_lines_16, vec16_t, vec16_t, 16U, LOAD_ONCE, SAME)
LINES_FUNCTION(copy_lines_128, vec16_t, vec16_t, 16U, LOAD_LINE, SAME)
LINES_FUNCTION(narrow_lines, vec16_t, vec8_t, 4U, LOAD_ONCE, narrow)
LINES_FUNCTION(widen_lines, vec8_t, vec16_t, 4U, LOAD_PLAIN, widen)
TILE_FUNCTION(copy_units_1, u8_t, u8_t, 1U, LOAD_PLAIN, SAME)
TILE_FUNCTION(copy_units_2, u16_t, u16_t, 2U, LOAD_PLAIN, SAME)
TILE_FUNCTION(copy_units_4, u32_t, u32_t, 4U, LOAD_PLAIN, SAME)
TILE_FUNCTION(copy_units_8, u64_t, u64_t, 8U, LOAD_PLAIN, SAME)
TILE_FUNCTION(copy_units_16, vec16_t, vec16_t, 16U, LOAD_ONCE, SAME)

DEVICE unsigned load_item(const u8_t *from, unsigned nbytes)
{
    unsigned bits = 0;

    if (nbytes == 4 && low_bits(from) % 4 == 0) {
        return LOAD_PLAIN(u32_t, from);
    }
    if (nbytes == 2 && low_bits(from) % 2 == 0) {
        return LOAD_PLAIN(u16_t, from);
    }
    NO_UNROLL for (unsigned i = nbytes; i-- > 0;)
    {
        bits = bits << 8 | from[i];
    }
    return bits;
}

DEVICE void store_item(u8_t *to, unsigned bits, unsigned nbytes)
{
    if (nbytes == 4 && low_bits(to) % 4 == 0) {
        *(u32_t *)(void *)to = bits;
    } else if (nbytes == 2 && low_bits(to) % 2 == 0) {
        *(u16_t *)(void *)to = (u16_t)bits;
    } else {
        NO_UNROLL for (unsigned i = 0; i < nbytes; i++)
        {
            to[i] = (u8_t)(bits >> (8 * i));
        }
    }
}

/* One by one: what is computed, rows that groups of four do not fit, odd addresses. */
DEVICE void cast_items(const tile_t *tile, unsigned kind, unsigned lane)
{
    const unsigned from_nbytes = TABLE(tile->segment->source_item_nbytes);
    const unsigned to_nbytes = TABLE(tile->segment->destination_item_nbytes);
    const float scale = TABLE(tile->segment->scale);
    const float offset = TABLE(tile->segment->offset);

    NO_UNROLL for (unsigned i = lane; i < tile->count; i += WARP)
    {
        const u8_t *from;
        u8_t *to;

        locate(tile, i, from_nbytes, to_nbytes, &from, &to);
        store_item(to, wsync_convert(kind, load_item(from, from_nbytes), scale, offset),
                   to_nbytes);
    }
}

DEVICE unsigned funnel(unsigned low, unsigned high, unsigned bits)
{
    return (unsigned)(((unsigned long long)high << 32 | low) >> bits);
}

/* Bytes [by, by + 16) of two neighbours: first whole words, two and one, then bits. */
DEVICE vec16_t realign(vec16_t low, vec16_t high, unsigned by)
{
    const unsigned bits = by % 4 * 8;
    const unsigned a0 = (by & 8U) != 0 ? low.z : low.x;
    const unsigned a1 = (by & 8U) != 0 ? low.w : low.y;
    const unsigned a2 = (by & 8U) != 0 ? high.x : low.z;
    const unsigned a3 = (by & 8U) != 0 ? high.y : low.w;
    const unsigned a4 = (by & 8U) != 0 ? high.z : high.x;
    const unsigned a5 = (by & 8U) != 0 ? high.w : high.y;
    const unsigned b0 = (by & 4U) != 0 ? a1 : a0;
    const unsigned b1 = (by & 4U) != 0 ? a2 : a1;
    const unsigned b2 = (by & 4U) != 0 ? a3 : a2;
    const unsigned b3 = (by & 4U) != 0 ? a4 : a3;
    const unsigned b4 = (by & 4U) != 0 ? a5 : a4;
    vec16_t result;

    result.x = funnel(b0, b1, bits);
    result.y = funnel(b1, b2, bits);
    result.z = funnel(b2, b3, bits);
    result.w = funnel(b3, b4, bits);
    return result;
}

DEVICE void store_vector(u8_t *to, unsigned index, vec16_t value)
{
    ((vec16_t *)(void *)to)[index] = value;
}

/* Both sides are aligned to 16 bytes. */
DEVICE void copy_vectors(u8_t *to, const u8_t *from, unsigned count, unsigned lane)
{
    NO_UNROLL for (unsigned i = lane; i < count; i += DEPTH * WARP)
    {
        vec16_t value[DEPTH];

        UNROLL for (unsigned k = 0; k < DEPTH; k++)
        {
            value[k] = load_line(from + 16 * at_most(i + k * WARP, count - 1));
        }
        UNROLL for (unsigned k = 0; k < DEPTH; k++)
        {
            if (i + k * WARP < count) {
                store_vector(to, i + k * WARP, value[k]);
            }
        }
    }
}

/* Vector i of the destination is vectors i and i + 1 of the source, shifted.  Neighbours
 * read a vector both: these loads go through the first-level cache. */
DEVICE void realign_vectors(u8_t *to, const u8_t *from, unsigned by, unsigned count,
                            unsigned lane)
{
    enum { PAIRS = DEPTH / 2 };
    const vec16_t *vectors = (const vec16_t *)(const void *)from;

    NO_UNROLL for (unsigned i = lane; i < count; i += PAIRS * WARP)
    {
        vec16_t low[PAIRS];
        vec16_t high[PAIRS];

        UNROLL for (unsigned k = 0; k < PAIRS; k++)
        {
            const unsigned at = at_most(i + k * WARP, count - 1);

            low[k] = vectors[at];
            high[k] = vectors[at + 1];
        }
        UNROLL for (unsigned k = 0; k < PAIRS; k++)
        {
            if (i + k * WARP < count) {
                store_vector(to, i + k * WARP, realign(low[k], high[k], by));
            }
        }
    }
}

/* Bytes that lie together, at any addresses.  No load leaves the source: at both ends, in
 * at most 31 bytes, every lane copies one. */
DEVICE void copy_run(u8_t *to, const u8_t *from, unsigned nbytes, unsigned lane)
{
    unsigned head = (0U - low_bits(to)) & 15U;
    const unsigned by = (low_bits(from) + head) & 15U;
    unsigned vectors;
    unsigned tail;

    if (nbytes < VECTORS_MIN_NBYTES) {
        NO_UNROLL for (unsigned i = lane; i < nbytes; i += WARP)
        {
            to[i] = from[i];
        }
        return;
    }
    head += by > head ? 16 : 0;
    vectors = (nbytes - head) / 16;
    if (by > 0 && (nbytes - head) % 16 < 16 - by) {
        vectors--;
    }
    tail = head + 16 * vectors;
    if (lane < head) {
        to[lane] = from[lane];
    }
    if (tail + lane < nbytes) {
        to[tail + lane] = from[tail + lane];
    }
    if (by == 0) {
        copy_vectors(to + head, from + head, vectors, lane);
    } else {
        realign_vectors(to + head, from + head - by, by, vectors, lane);
    }
}

/* Byte number `at` of 16. */
DEVICE u8_t byte_of(vec16_t value, unsigned at)
{
    const unsigned low = (at & 4U) != 0 ? value.y : value.x;
    const unsigned high = (at & 4U) != 0 ? value.w : value.z;

    return (u8_t)(((at & 8U) != 0 ? high : low) >> (at % 4 * 8));
}

/* `pattern` over and over, from its first byte on. */
DEVICE void fill_run(u8_t *to, vec16_t pattern, unsigned nbytes, unsigned lane)
{
    const unsigned wanted = (0U - low_bits(to)) & 15U;
    const unsigned head = wanted < nbytes ? wanted : nbytes;
    const unsigned vectors = (nbytes - head) / 16;
    const unsigned tail = head + 16 * vectors;
    const vec16_t body = realign(pattern, pattern, head);

    if (lane < head) {
        to[lane] = byte_of(pattern, lane);
    }
    if (tail + lane < nbytes) {
        to[tail + lane] = byte_of(body, lane);
    }
    NO_UNROLL for (unsigned i = lane; i < vectors; i += WARP)
    {
        store_vector(to + head, i, body);
    }
}

/* The period's bytes, repeated to 16: each comes in at the top. */
DEVICE vec16_t load_pattern(const u8_t *from, unsigned period)
{
    unsigned long long low = 0;
    unsigned long long high = 0;
    vec16_t value;

    NO_UNROLL for (unsigned i = 0; i < 16; i++)
    {
        low = low >> 8 | high << 56;
        high = high >> 8 | (unsigned long long)from[i & (period - 1)] << 56;
    }
    value.x = (unsigned)low;
    value.y = (unsigned)(low >> 32);
    value.z = (unsigned)high;
    value.w = (unsigned)(high >> 32);
    return value;
}

/* The addresses of all rows of a tile, or'ed: what divides this divides each of them. */
DEVICE unsigned low_bits_of(const tile_t *tile)
{
    unsigned bits = low_bits(tile->source) | low_bits(tile->destination);

    NO_UNROLL for (unsigned d = 0; d < TABLE(tile->segment->ndim); d++)
    {
        bits |= (unsigned)TABLE(tile->segment->source_stride[d]) |
                (unsigned)TABLE(tile->segment->destination_stride[d]);
    }
    return bits;
}

/* Every row of a tile by itself: bytes, or a fill. */
DEVICE void run_rows(const tile_t *tile, unsigned kind, unsigned lane)
{
    const unsigned rows = tile->rows > 0 ? tile->rows : 1;
    const unsigned nbytes = tile->row_count;
    const unsigned period = TABLE(tile->segment->source_item_nbytes);

    NO_UNROLL for (unsigned i = 0; i < rows; i++)
    {
        const u8_t *from = tile->source;
        u8_t *to = tile->destination;

        if (tile->rows > 0) {
            seek(tile->segment, tile->row + i, &from, &to);
        }
        if (kind == WSYNC_SEGMENT_FILL) {
            fill_run(to, load_pattern(from, period), nbytes, lane);
        } else {
            copy_run(to, from, nbytes, lane);
        }
    }
}

/* Rows that do not lie at equal distances, in units. */
DEVICE void run_units(const tile_t *tile, unsigned bits, unsigned kind, unsigned lane)
{
    if (bits % 16 == 0) {
        copy_units_16(tile, kind, lane);
    } else if (bits % 8 == 0) {
        copy_units_8(tile, kind, lane);
    } else if (bits % 4 == 0) {
        copy_units_4(tile, kind, lane);
    } else if (bits % 2 == 0) {
        copy_units_2(tile, kind, lane);
    } else {
        copy_units_1(tile, kind, lane);
    }
}

DEVICE void run_lines(const lines_t *lines, unsigned bits, unsigned kind, unsigned lane)
{
    if (bits % 128 == 0) {
        copy_lines_128(lines, kind, lane);
    } else if (bits % 16 == 0) {
        copy_lines_16(lines, kind, lane);
    } else if (bits % 8 == 0) {
        copy_lines_8(lines, kind, lane);
    } else if (bits % 4 == 0) {
        copy_lines_4(lines, kind, lane);
    } else if (bits % 2 == 0) {
        copy_lines_2(lines, kind, lane);
    } else {
        copy_lines_1(lines, kind, lane);
    }
}

DEVICE void run_copy(const tile_t *tile, unsigned kind, unsigned lane)
{
    const unsigned bits = low_bits_of(tile) | tile->row_count;
    lines_t lines;

    if (tile->rows == 0 || (bits % 16 != 0 && tile->row_count >= RUN_MIN_NBYTES)) {
        run_rows(tile, kind, lane);
    } else if (make_lines(tile, &lines)) {
        run_lines(&lines, bits, kind, lane);
    } else {
        run_units(tile, bits, kind, lane);
    }
}

DEVICE void run_cast(const tile_t *tile, unsigned kind, unsigned lane)
{
    lines_t lines;
    unsigned source;
    unsigned destination;

    if (tile->row_count % 4 != 0 || TABLE(tile->segment->scale) != 0.0F ||
        !make_lines(tile, &lines)) {
        cast_items(tile, kind, lane);
        return;
    }
    source = low_bits(lines.source) | (unsigned)lines.source_step;
    destination = low_bits(lines.destination) | (unsigned)lines.destination_step;
    if (kind != WSYNC_SEGMENT_BF16_TO_F32 && source % 16 == 0 && destination % 8 == 0) {
        narrow_lines(&lines, kind, lane);
    } else if (kind == WSYNC_SEGMENT_BF16_TO_F32 && source % 8 == 0 &&
               destination % 16 == 0) {
        widen_lines(&lines, kind, lane);
    } else {
        cast_items(tile, kind, lane);
    }
}

/* Tile number `index` of the segment. */
DEVICE void run_tile(const wsync_segment_t *segment, unsigned index, const u8_t *source,
                     u8_t *destination, unsigned lane)
{
    const unsigned kind = TABLE(segment->kind);
    tile_t tile;

    tile.segment = segment;
    tile.source = source + TABLE(segment->source_offset);
    tile.destination = destination + TABLE(segment->destination_offset);
    if (TABLE(segment->chunks.value) == 1) {
        const unsigned wanted = TABLE(segment->rows_per_tile);
        const unsigned left = TABLE(segment->row_total) - index * wanted;

        tile.row = index * wanted;
        tile.rows = left < wanted ? left : wanted;
        tile.row_count = TABLE(segment->row.value);
        tile.count = tile.rows * tile.row_count;
    } else {
        const unsigned wanted = TABLE(segment->chunk_count);
        unsigned long long start;
        unsigned long long left;

        tile.row = divide(index, &segment->chunks);
        start =
            (unsigned long long)(index - tile.row * TABLE(segment->chunks.value)) * wanted;
        left = TABLE(segment->row_count) - start;
        tile.rows = 0;
        tile.count = left < wanted ? (unsigned)left : wanted;
        tile.row_count = tile.count;
        seek(segment, tile.row, &tile.source, &tile.destination);
        tile.destination += start * TABLE(segment->destination_item_nbytes);
        /* The source of a fill is one period, however long its rows are. */
        tile.source +=
            kind == WSYNC_SEGMENT_FILL ? 0 : start * TABLE(segment->source_item_nbytes);
    }
    if (kind == WSYNC_SEGMENT_COPY) {
        run_copy(&tile, kind, lane);
    } else if (kind == WSYNC_SEGMENT_FILL) {
        run_rows(&tile, kind, lane);
    } else {
        run_cast(&tile, kind, lane);
    }
}

/* The segment in [low, high) that holds the tile. */
DEVICE unsigned find_segment(const unsigned *tile_starts, unsigned tile, unsigned low,
                             unsigned high)
{
    while (high - low > 1) {
        const unsigned middle = low + (high - low) / 2;

        if (TABLE(tile_starts[middle]) <= tile) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

KERNEL wsync_copy(wsync_kernel_args_t args)
{
    const wsync_segment_t *segments = (const wsync_segment_t *)GLOBAL(args.segments);
    const unsigned *tile_starts = (const unsigned *)GLOBAL(args.tile_starts);
    const unsigned *tile_index = (const unsigned *)GLOBAL(args.tile_index);
    const unsigned long long *sources = (const unsigned long long *)GLOBAL(args.sources);
    const unsigned long long *destinations =
        (const unsigned long long *)GLOBAL(args.destinations);
    const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned warps = gridDim.x * blockDim.x / WARP;
    const unsigned end = TABLE(tile_starts[args.first + args.count]);
    unsigned tile = TABLE(tile_starts[args.first]) + thread / WARP;

    for (; tile < end; tile += warps) {
        const unsigned group = tile / WSYNC_TILE_GROUP;
        const unsigned at = find_segment(tile_starts, tile, TABLE(tile_index[group]),
                                         TABLE(tile_index[group + 1]) + 1);
        const wsync_segment_t *segment = &segments[at];

        run_tile(segment, tile - TABLE(tile_starts[at]),
                 (const u8_t *)GLOBAL(TABLE(sources[TABLE(segment->source_buffer)])),
                 (u8_t *)GLOBAL(TABLE(destinations[TABLE(segment->destination_buffer)])),
                 thread % WARP);
    }
}

#include "device/quantise_kernels.cu"
