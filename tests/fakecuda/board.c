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
    atomic_int waiting[MAX_NUMBER]; /* streams, for the process's turn at a device */
} fake_use_t;

/* Whose work a device does. */
typedef struct fake_turn {
    _Atomic uint64_t state; /* pid of the process, 0: nobody's; and how much of it runs */
    _Atomic uint64_t since; /* ns */
    atomic_int last;        /* pid of the process that has given it back */
} fake_turn_t;

typedef struct fake_board {
    fake_use_t uses[MAX_PROCESSES];
    fake_turn_t turns[MAX_NUMBER];
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
                atomic_store(&use->waiting[d], 0);
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

/* --- turns ------------------------------------------------------------------------------
 * One process's streams have a device at a time, for a slice while others wait.  A process
 * that is stopped or has ended loses it: a real device takes work away in its midst. */

enum { RUNNING_BITS = 32, LOOK_AGAIN = 200 };

static pid_t process_of(uint64_t state)
{
    return (pid_t)(state >> RUNNING_BITS);
}

static bool is_idle(uint64_t state)
{
    return (state & (((uint64_t)1 << RUNNING_BITS) - 1)) == 0;
}

static uint64_t mine(void)
{
    return (uint64_t)fake.pid << RUNNING_BITS;
}

static fake_turn_t *turn_of(int device)
{
    return &fake.board->turns[number_of(device)];
}

static bool is_wanted(int device)
{
    for (int i = 0; i < MAX_PROCESSES; i++) {
        fake_use_t *use = &fake.board->uses[i];
        const int pid = atomic_load(&use->pid);

        if (pid != 0 && pid != fake.pid &&
            atomic_load(&use->waiting[number_of(device)]) > 0) {
            const char state = state_of(pid);

            if (state != 'X' && state != 'Z' && state != 'T') {
                return true;
            }
        }
    }
    return false;
}

bool fake_turn_is_over(int device)
{
    return fake.slice_us > 0 &&
           fake_now_ns() - atomic_load(&turn_of(device)->since) > fake.slice_us * 1000 &&
           is_wanted(device);
}

/* Whether a turn could be begun, or gone on with; looks at processes now and then. */
static bool take_turn(int device, bool look)
{
    fake_turn_t *turn = turn_of(device);
    uint64_t state = atomic_load(&turn->state);
    const pid_t holder = process_of(state);
    bool free = holder == 0 && (atomic_load(&turn->last) != fake.pid || !is_wanted(device));

    if (holder == fake.pid) {
        if (!fake_turn_is_over(device)) {
            return atomic_compare_exchange_strong(&turn->state, &state, state + 1);
        }
        atomic_store(&turn->last, fake.pid);
        (void)(is_idle(state) && atomic_compare_exchange_strong(&turn->state, &state, 0));
        return false;
    }
    if (holder != 0 && is_idle(state)) {
        free = fake_now_ns() - atomic_load(&turn->since) > fake.slice_us * 1000;
    }
    if (holder != 0 && !free && look) {
        const char found = state_of(holder);

        free = found == 'X' || found == 'Z' || found == 'T';
    }
    if (!free || !atomic_compare_exchange_strong(&turn->state, &state, mine() | 1)) {
        return false;
    }
    atomic_store(&turn->since, fake_now_ns());
    return true;
}

void fake_turn_begin(int device)
{
    atomic_int *waiting = &fake.use->waiting[number_of(device)];
    long looks = 0;

    if (fake.slice_us == 0 || take_turn(device, true)) {
        return;
    }
    (void)atomic_fetch_add(waiting, 1);
    while (atomic_load(&fake.lost) == 0 && !take_turn(device, ++looks % LOOK_AGAIN == 0)) {
        fake_pause();
    }
    (void)atomic_fetch_sub(waiting, 1);
}

void fake_turn_end(int device, bool gives_it_back)
{
    fake_turn_t *turn = turn_of(device);
    uint64_t state = atomic_load(&turn->state);
    uint64_t next;

    if (fake.slice_us == 0) {
        return;
    }
    do {
        if (process_of(state) != fake.pid || is_idle(state)) {
            return; /* it was taken away, or not had by a device that is lost */
        }
        next = is_idle(state - 1) && (gives_it_back || fake_turn_is_over(device))
                   ? 0
                   : state - 1;
        if (next == 0) {
            atomic_store(&turn->last, fake.pid);
        }
    } while (!atomic_compare_exchange_weak(&turn->state, &state, next));
}
