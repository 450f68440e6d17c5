/* SPDX-License-Identifier: Apache-2.0
 * The frame parser on any bytes: it reads only what it is given, leaves the frame alone
 * when it refuses, and what it takes is exactly what would be sent for the result. */
#include <stdlib.h>
#include <string.h>

#include "ipc/frame.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes)
{
    wsync_frame_t frame;
    wsync_frame_t before;
    wsync_error_t err = {0};
    uint8_t header[WSYNC_FRAME_HEADER_NBYTES];

    memset(&before, 0x5a, sizeof(before));
    memcpy(&frame, &before, sizeof(frame)); /* padding too */
    if (wsync_frame_parse(data, nbytes, &frame, &err) != WSYNC_OK) {
        if (memcmp(&frame, &before, sizeof(frame)) != 0 || err.message[0] == '\0') {
            abort();
        }
        return 0;
    }
    wsync_frame_encode_header(&frame, header);
    if (nbytes != sizeof(header) + frame.payload_nbytes ||
        memcmp(data, header, sizeof(header)) != 0 ||
        memcmp(data + sizeof(header), frame.payload, frame.payload_nbytes) != 0 ||
        frame.fd_count != before.fd_count) {
        abort();
    }
    return 0;
}
