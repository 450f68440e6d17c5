/* SPDX-License-Identifier: Apache-2.0
 * Bytes as hexadecimal text. */
#ifndef WSYNC_CORE_BASE_HEX_H
#define WSYNC_CORE_BASE_HEX_H

#include <stdint.h>
#include <string.h>

/* The value of a hexadecimal digit, or -1. */
static inline int wsync_hex_digit(char digit)
{
    static const char digits[] = "0123456789abcdef0123456789ABCDEF";
    const char *found = digit != '\0' ? strchr(digits, digit) : NULL;

    return found != NULL ? (int)(found - digits) % 16 : -1;
}

/* The value of two digits, or -1. */
static inline int wsync_hex_byte(const char *text)
{
    const int high = wsync_hex_digit(text[0]);
    const int low = high < 0 ? -1 : wsync_hex_digit(text[1]);

    return low < 0 ? -1 : 16 * high + low;
}

/* Writes two digits for each byte, and an end. */
static inline void wsync_hex_write(const void *bytes, size_t nbytes, char *text)
{
    for (size_t i = 0; i < nbytes; i++) {
        const unsigned byte = ((const uint8_t *)bytes)[i];

        text[2 * i] = "0123456789abcdef"[byte >> 4];
        text[2 * i + 1] = "0123456789abcdef"[byte & 15];
    }
    text[2 * nbytes] = '\0';
}

#endif
