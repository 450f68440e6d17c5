/* SPDX-License-Identifier: Apache-2.0
 * What processes know of each other's use of a device: a file that they all map. */
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fake.h"

enum { MAX_PROCESSES = 64, MAX_NUMBER = 2 * FAKE_MAX_DEVICES };

typedef struct fake_use {
    atomic_int pid; /* 0: nobody's */
    atomic_size_t nbytes[MAX_NUMBER];
} fake_use_t;

typedef struct fake_board {
    fake_use_t uses[MAX_PROCESSES];
} fake_board_t;

/* A device's number is the same in all processes. */
static int number_of(int device)
{
    return (fake.first + device) % MAX_NUMBER;
}

/* As /proc says it; X: there is none. */
static char state_of(pid_t pid)
{
    char path[32];
    char state = 'X';
    FILE *file;

    (void)snprintf(path, sizeof(path), "/proc/%d/stat", pid);
    file = fopen(path, "re");
    if (file != NULL) {
        (void)(fscanf(file, "%*d (%*[^)]) %c", &state) == 1);
        (void)fclose(file);
    }
    return state;
}

bool fake_is_alive(pid_t pid)
{
    const char state = state_of(pid);

    return state != 'X' && state != 'Z';
}

/* Of a process that has ended, or nobody's. */
static fake_use_t *take_use(fake_board_t *board)
{
    for (int i = 0; i < MAX_PROCESSES; i++) {
        fake_use_t *use = &board->uses[i];
        int pid = atomic_load(&use->pid);

        if ((pid == 0 || !fake_is_alive(pid)) &&
            atomic_compare_exchange_strong(&use->pid, &pid, (int)getpid())) {
            for (int d = 0; d < MAX_NUMBER; d++) {
                atomic_store(&use->nbytes[d], 0);
            }
            return use;
        }
    }
    return NULL;
}

bool fake_board_open(const char *path)
{
    const bool shared = path != NULL && path[0] != '\0';
    const int fd = shared ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : -1;
    fake_board_t *board = MAP_FAILED;

    if (!shared || (fd >= 0 && ftruncate(fd, (off_t)sizeof(*board)) == 0)) {
        board = mmap(NULL, sizeof(*board), PROT_READ | PROT_WRITE,
                     MAP_SHARED | (shared ? 0 : MAP_ANONYMOUS), fd, 0);
    }
    if (fd >= 0) {
        (void)close(fd);
    }
    fake.board = board != MAP_FAILED ? board : NULL;
    fake.use = fake.board != NULL ? take_use(fake.board) : NULL;
    return fake.use != NULL;
}

size_t fake_free_nbytes(int device)
{
    size_t used = 0;

    for (int i = 0; i < MAX_PROCESSES; i++) {
        fake_use_t *use = &fake.board->uses[i];
        const int pid = atomic_load(&use->pid);

        if (pid != 0 && fake_is_alive(pid)) {
            used += atomic_load(&use->nbytes[number_of(device)]);
        }
    }
    return used < fake.memory ? fake.memory - used : 0;
}

void fake_charge(int device, size_t nbytes)
{
    (void)atomic_fetch_add(&fake.use->nbytes[number_of(device)], nbytes);
}
