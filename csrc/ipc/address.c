/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "core/base/hex.h"
#include "ipc/channel.h"

void wsync_address_format(const uint8_t token[WSYNC_TOKEN_NBYTES], const char *path,
                          char address[WSYNC_ADDRESS_NBYTES])
{
    wsync_hex_write(token, WSYNC_TOKEN_NBYTES, address);
    (void)snprintf(address + (size_t)2 * WSYNC_TOKEN_NBYTES,
                   WSYNC_ADDRESS_NBYTES - 2 * WSYNC_TOKEN_NBYTES, "@%s", path);
}

wsync_status_t wsync_address_parse(const char *address, uint8_t token[WSYNC_TOKEN_NBYTES],
                                   char path[WSYNC_PATH_NBYTES], wsync_error_t *err)
{
    uint8_t parsed[WSYNC_TOKEN_NBYTES];
    size_t path_length;

    /* The text is not repeated in messages: it holds the secret. */
    for (size_t i = 0; i < sizeof(parsed); i++) {
        const int value = wsync_hex_byte(address + 2 * i);

        if (value < 0) {
            return wsync_fail(err, WSYNC_ERR_INVALID, 0, "address",
                              "address: characters %zu and %zu are not among the token's "
                              "%zu hexadecimal digits",
                              2 * i, 2 * i + 1, 2 * sizeof(parsed));
        }
        parsed[i] = (uint8_t)value;
    }
    if (address[2 * sizeof(parsed)] != '@') {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "address",
                          "address: no '@' after the token's %zu digits",
                          2 * sizeof(parsed));
    }
    path_length = strlen(address + 2 * sizeof(parsed) + 1);
    if (path_length == 0 || path_length >= WSYNC_PATH_NBYTES) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "address",
                          "address: socket path of %zu bytes, a socket allows 1 to %d",
                          path_length, WSYNC_PATH_NBYTES - 1);
    }
    memcpy(path, address + 2 * sizeof(parsed) + 1, path_length + 1);
    memcpy(token, parsed, sizeof(parsed));
    return WSYNC_OK;
}

wsync_status_t wsync_token_create(uint8_t token[WSYNC_TOKEN_NBYTES], wsync_error_t *err)
{
    if (TEMP_FAILURE_RETRY(getrandom(token, WSYNC_TOKEN_NBYTES, 0)) != WSYNC_TOKEN_NBYTES) {
        return wsync_fail(err, WSYNC_ERR_OS, errno, "getrandom", "getrandom: %s",
                          strerror(errno));
    }
    return WSYNC_OK;
}
