/* SPDX-License-Identifier: Apache-2.0 */
#include "ipc/frame.h"

#include <string.h>
#include <unistd.h>

enum {
    FRAME_MAGIC = 0x43595357, /* "WSYC" */
    FRAME_VERSION = 1,
};

static void put_u32(uint8_t *to, uint32_t value)
{
    for (int i = 0; i < 4; i++) {
        to[i] = (uint8_t)(value >> (8 * i));
    }
}

static void put_u64(uint8_t *to, uint64_t value)
{
    put_u32(to, (uint32_t)value);
    put_u32(to + 4, (uint32_t)(value >> 32));
}

static uint32_t get_u32(const uint8_t *from)
{
    return (uint32_t)from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16 |
           (uint32_t)from[3] << 24;
}

static uint64_t get_u64(const uint8_t *from)
{
    return (uint64_t)get_u32(from) | (uint64_t)get_u32(from + 4) << 32;
}

void wsync_frame_fini(wsync_frame_t *frame)
{
    for (uint32_t i = 0; i < frame->fd_count && i < WSYNC_FRAME_FDS; i++) {
        if (frame->fds[i] >= 0) {
            (void)close(frame->fds[i]);
            frame->fds[i] = -1;
        }
    }
    frame->fd_count = 0;
}

void wsync_frame_encode_header(const wsync_frame_t *frame,
                               uint8_t header[WSYNC_FRAME_HEADER_NBYTES])
{
    put_u32(header, FRAME_MAGIC);
    put_u32(header + 4, FRAME_VERSION);
    put_u32(header + 8, frame->kind);
    put_u32(header + 12, frame->payload_nbytes);
    for (size_t i = 0; i < 4; i++) {
        put_u64(header + 16 + 8 * i, frame->arguments[i]);
    }
}

wsync_status_t wsync_frame_parse(const uint8_t *data, size_t nbytes, wsync_frame_t *frame,
                                 wsync_error_t *err)
{
    uint32_t payload_nbytes;

    if (nbytes < WSYNC_FRAME_HEADER_NBYTES) {
        return wsync_fail(err, WSYNC_ERR_PROTOCOL, 0, "frame",
                          "frame of %zu bytes is shorter than its header of %d", nbytes,
                          WSYNC_FRAME_HEADER_NBYTES);
    }
    if (get_u32(data) != FRAME_MAGIC) {
        return wsync_fail(err, WSYNC_ERR_PROTOCOL, 0, "frame",
                          "frame starts with 0x%08x, not 0x%08x", (unsigned)get_u32(data),
                          (unsigned)FRAME_MAGIC);
    }
    if (get_u32(data + 4) != FRAME_VERSION) {
        return wsync_fail(err, WSYNC_ERR_PROTOCOL, 0, "frame",
                          "peer speaks version %u of the frame format, this side %d",
                          (unsigned)get_u32(data + 4), FRAME_VERSION);
    }
    payload_nbytes = get_u32(data + 12);
    if (payload_nbytes > WSYNC_FRAME_PAYLOAD_NBYTES ||
        payload_nbytes != nbytes - WSYNC_FRAME_HEADER_NBYTES) {
        return wsync_fail(err, WSYNC_ERR_PROTOCOL, 0, "frame",
                          "frame says %u payload bytes and carries %zu (at most %d)",
                          (unsigned)payload_nbytes, nbytes - WSYNC_FRAME_HEADER_NBYTES,
                          WSYNC_FRAME_PAYLOAD_NBYTES);
    }
    frame->kind = get_u32(data + 8);
    frame->payload_nbytes = payload_nbytes;
    for (size_t i = 0; i < 4; i++) {
        frame->arguments[i] = get_u64(data + 16 + 8 * i);
    }
    memcpy(frame->payload, data + WSYNC_FRAME_HEADER_NBYTES, payload_nbytes);
    return WSYNC_OK;
}
