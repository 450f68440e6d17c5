/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "ipc/channel.h"

static const char digits[] = "0123456789abcdef";

/* The value of a hexadecimal digit, or -1. */
static int hex_value(char digit)
{
    const char *found = digit != '\0' ? strchr(digits, digit) : NULL;

    return found != NULL ? (int)(found - digits) : -1;
}

void wsync_address_format(const uint8_t token[WSYNC_TOKEN_NBYTES], const char *path,
                          char address[WSYNC_ADDRESS_NBYTES])
{
    for (size_t i = 0; i < WSYNC_TOKEN_NBYTES; i++) {
        address[2 * i] = digits[token[i] >> 4];
        address[2 * i + 1] = digits[token[i] & 15];
    }
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
        const int high = hex_value(address[2 * i]);
        const int low = high < 0 ? -1 : hex_value(address[2 * i + 1]);

        if (low < 0) {
            return wsync_fail(err, WSYNC_ERR_INVALID, 0, "address",
                              "address: character %zu is not one of the token's %zu "
                              "hexadecimal digits",
                              2 * i + (high < 0 ? 0U : 1U), 2 * sizeof(parsed));
        }
        parsed[i] = (uint8_t)(high << 4 | low);
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
