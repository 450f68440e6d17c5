/* SPDX-License-Identifier: Apache-2.0 */
#include "ipc/frame.h"

#include <string.h>
#include <unistd.h>

enum {
    FRAME_MAGIC = 0x43595357, /* "WSYC" */
    FRAME_VERSION = 1,
};

typedef struct header {
    uint32_t magic;
    uint32_t version;
    uint32_t kind;
    uint32_t payload_nbytes;
    uint64_t arguments[4];
} header_t;

_Static_assert(sizeof(header_t) == WSYNC_FRAME_HEADER_NBYTES, "the header has padding");

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
    header_t made = {FRAME_MAGIC, FRAME_VERSION, frame->kind, frame->payload_nbytes, {0}};

    memcpy(made.arguments, frame->arguments, sizeof(made.arguments));
    memcpy(header, &made, sizeof(made));
}

wsync_status_t wsync_frame_parse(const uint8_t *data, size_t nbytes, wsync_frame_t *frame,
                                 wsync_error_t *err)
{
    header_t header;

    if (nbytes < WSYNC_FRAME_HEADER_NBYTES) {
        return wsync_fail(err, WSYNC_ERR_PROTOCOL, 0, "frame",
                          "frame of %zu bytes is shorter than its header of %d", nbytes,
                          WSYNC_FRAME_HEADER_NBYTES);
    }
    memcpy(&header, data, sizeof(header));
    if (header.magic != FRAME_MAGIC) {
        return wsync_fail(err, WSYNC_ERR_PROTOCOL, 0, "frame",
                          "frame starts with 0x%08x, not 0x%08x", header.magic,
                          (unsigned)FRAME_MAGIC);
    }
    if (header.version != FRAME_VERSION) {
        return wsync_fail(err, WSYNC_ERR_PROTOCOL, 0, "frame",
                          "peer speaks version %u of the frame format, this side %d",
                          header.version, FRAME_VERSION);
    }
    if (header.payload_nbytes > WSYNC_FRAME_PAYLOAD_NBYTES ||
        header.payload_nbytes != nbytes - WSYNC_FRAME_HEADER_NBYTES) {
        return wsync_fail(err, WSYNC_ERR_PROTOCOL, 0, "frame",
                          "frame says %u payload bytes and carries %zu (at most %d)",
                          header.payload_nbytes, nbytes - WSYNC_FRAME_HEADER_NBYTES,
                          WSYNC_FRAME_PAYLOAD_NBYTES);
    }
    frame->kind = header.kind;
    frame->payload_nbytes = header.payload_nbytes;
    memcpy(frame->arguments, header.arguments, sizeof(header.arguments));
    memcpy(frame->payload, data + sizeof(header), header.payload_nbytes);
    return WSYNC_OK;
}
