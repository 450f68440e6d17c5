/* SPDX-License-Identifier: Apache-2.0
 * A frame's bytes on the wire, as pure functions: 48 bytes of header (magic, version, kind,
 * payload_nbytes as 32-bit words, four 64-bit arguments, in the byte order of the machine,
 * on which both ends are), then the payload and nothing after it. */
#ifndef WSYNC_IPC_FRAME_H
#define WSYNC_IPC_FRAME_H

#include "ipc/channel.h"

enum {
    WSYNC_FRAME_HEADER_NBYTES = 48,
    WSYNC_FRAME_WIRE_NBYTES = WSYNC_FRAME_HEADER_NBYTES + WSYNC_FRAME_PAYLOAD_NBYTES,
};

void wsync_frame_encode_header(const wsync_frame_t *frame,
                               uint8_t header[WSYNC_FRAME_HEADER_NBYTES]);
/* Fills kind, arguments and payload of *frame and leaves its descriptors alone.  PROTOCOL
 * names field and value; *frame is then untouched. */
wsync_status_t wsync_frame_parse(const uint8_t *data, size_t nbytes, wsync_frame_t *frame,
                                 wsync_error_t *err);

#endif
