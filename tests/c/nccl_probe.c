/* SPDX-License-Identifier: Apache-2.0
 * nccl_probe LIBNCCL: what a process that looks for NCCL does, for the gate that tries it
 * with real ones.  Prints a line "version V", and what the functions answer. */
#include <stdio.h>

#include "comm/nccl_library.h"

static void print_words(const wsync_nccl_library_t *library)
{
    for (int result = 0; result <= WSYNC_NCCL_IN_PROGRESS; result++) {
        (void)printf("result %d %s\n", result, library->get_error_string(result));
    }
}

int main(int argc, char **argv)
{
    const wsync_nccl_library_t *library = NULL;
    const char *paths[1];
    wsync_nccl_id_t id;
    wsync_error_t err;

    if (argc != 2) {
        return 2;
    }
    paths[0] = argv[1];
    if (wsync_nccl_library(paths, 1, &library, &err) != WSYNC_OK) {
        (void)fprintf(stderr, "%s\n", err.message);
        return 1;
    }
    (void)printf("version %d\npath %s\n", library->version, library->path);
    print_words(library);
    (void)printf("id %d\n", library->get_unique_id(&id));
    return 0;
}
