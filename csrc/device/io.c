/* SPDX-License-Identifier: Apache-2.0 */
#include "device/io.h"

#include <errno.h>
#include <unistd.h>

bool wsync_read_all(int fd, void *data, size_t nbytes, size_t offset)
{
    unsigned char *at = data;
    size_t done = 0;

    while (done < nbytes) {
        const ssize_t count = pread(fd, at + done, nbytes - done, (off_t)(offset + done));

        if (count == 0) {
            errno = EIO;
        }
        if (count == 0 || (count < 0 && errno != EINTR)) {
            return false;
        }
        done += count > 0 ? (size_t)count : 0;
    }
    return true;
}

bool wsync_write_all(int fd, const void *data, size_t nbytes)
{
    const unsigned char *at = data;
    size_t done = 0;

    while (done < nbytes) {
        const ssize_t count = write(fd, at + done, nbytes - done);

        if (count < 0 && errno != EINTR) {
            return false;
        }
        done += count > 0 ? (size_t)count : 0;
    }
    return true;
}
