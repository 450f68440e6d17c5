/* SPDX-License-Identifier: Apache-2.0
 * Communicators: unique ids, init, progress, who may call what, the end. */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "fake_nccl.h"

enum { WAIT_NS = 50 * 1000, POLLS = 2, ID_MAGIC = 0x6e63636c };

/* What a unique id holds: where the process that made it keeps the ranks' memory. */
typedef struct unique_id {
    uint32_t magic;
    int32_t pid;
    int32_t fd;
    uint64_t nonce;
} unique_id_t;

_Static_assert(sizeof(unique_id_t) <= sizeof(wsync_nccl_id_t), "ids are 128 bytes");

/* An id of this process that none of its communicators has taken. */
typedef struct made_id {
    struct made_id *next;
    unique_id_t id;
} made_id_t;

static struct wsync_nccl_comm *comms; /* freed ones, too, which are known by that */
static made_id_t *ids;
static uint64_t next_nonce;

EXPORT int ncclGetUniqueId(wsync_nccl_id_t *id);
EXPORT int ncclCommInitRankConfig(wsync_nccl_comm_t *comm, int rank_count,
                                  wsync_nccl_id_t id, int rank,
                                  wsync_nccl_config_t *config);
EXPORT int ncclCommGetAsyncError(wsync_nccl_comm_t comm, int *result);
EXPORT int ncclCommAbort(wsync_nccl_comm_t comm);

static void pause_shortly(void)
{
    const struct timespec time = {.tv_nsec = WAIT_NS};

    (void)nanosleep(&time, NULL);
}

void *fake_driver_symbol(const char *name)
{
    const char *path = getenv("WSYNC_CUDA_LIB");
    void *library = path == NULL ? NULL : dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    void *address = library == NULL ? NULL : dlsym(library, name);

    if (library != NULL) {
        (void)dlclose(library);
    }
    return address;
}

/* --- unique ids -------------------------------------------------------------------------
 */

int ncclGetUniqueId(wsync_nccl_id_t *id)
{
    made_id_t *made;
    struct timespec now;

    made = calloc(1, sizeof(*made));
    if (made == NULL) {
        return WSYNC_NCCL_SYSTEM_ERROR;
    }
    (void)clock_gettime(CLOCK_REALTIME, &now);
    fake_lock();
    made->id = (unique_id_t){.magic = ID_MAGIC,
                             .pid = (int32_t)getpid(),
                             .fd = memfd_create("fakenccl", MFD_CLOEXEC),
                             .nonce = ((uint64_t)now.tv_nsec << 20 | next_nonce++) ^
                                      (uint64_t)now.tv_sec << 40 ^ (uint64_t)getpid() << 8};
    made->next = ids;
    ids = made;
    fake_unlock();
    if (made->id.fd < 0 || ftruncate(made->id.fd, (off_t)sizeof(fake_world_t)) != 0 ||
        pwrite(made->id.fd, &made->id.nonce, sizeof(made->id.nonce),
               offsetof(fake_world_t, nonce)) != (ssize_t)sizeof(made->id.nonce)) {
        return WSYNC_NCCL_SYSTEM_ERROR;
    }
    memset(id, 0, sizeof(*id));
    memcpy(id, &made->id, sizeof(made->id));
    return WSYNC_NCCL_SUCCESS;
}

/* The descriptor of an id's memory, moved out of this process's list or opened. */
static int take_id(const unique_id_t *wanted)
{
    char path[64];

    for (made_id_t **at = &ids; *at != NULL; at = &(*at)->next) {
        made_id_t *made = *at;

        if (made->id.nonce == wanted->nonce) {
            const int fd = made->id.fd;

            *at = made->next;
            free(made);
            return fd;
        }
    }
    (void)snprintf(path, sizeof(path), "/proc/%ld/fd/%d", (long)wanted->pid,
                   (int)wanted->fd);
    return open(path, O_RDWR | O_CLOEXEC);
}

/* What the ranks share, or NULL if there is no such thing any more. */
static fake_world_t *open_world(const wsync_nccl_id_t *id, int *kept)
{
    unique_id_t wanted;
    fake_world_t *world = MAP_FAILED;
    struct stat status = {.st_size = 0};
    int fd;

    memcpy(&wanted, id, sizeof(wanted));
    fd = wanted.magic == ID_MAGIC ? take_id(&wanted) : -1;
    if (fd >= 0 && fstat(fd, &status) == 0 &&
        status.st_size == (off_t)sizeof(fake_world_t)) {
        world = mmap(NULL, sizeof(*world), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    }
    if (fd >= 0 && (world == MAP_FAILED || wanted.pid != (int32_t)getpid())) {
        (void)close(fd);
        fd = -1;
    }
    *kept = fd;
    return world == MAP_FAILED ? NULL : world;
}

/* --- init -------------------------------------------------------------------------------
 */

static int read_uuid(uint8_t *uuid)
{
    fakecuda_current_func_t current;
    void *address = fake_driver_symbol(FAKECUDA_CURRENT);

    memcpy(&current, (const void *)&address, sizeof(current));
    if (address == NULL || current(uuid) != WSYNC_CU_SUCCESS) {
        return fake_misuse(WSYNC_NCCL_CUDA_ERROR,
                           "ncclCommInitRankConfig: no device's context is current");
    }
    return WSYNC_NCCL_SUCCESS;
}

/* Takes the rank's place among the others. */
static void join(struct wsync_nccl_comm *comm, const uint8_t *uuid)
{
    fake_member_t *self = &comm->world->members[comm->rank];

    self->version = atomic_load(&fake_settings.version);
    memcpy(self->uuid, uuid, FAKE_UUID_NBYTES);
    atomic_store(&self->joined, true);
}

/* A communicator that waits for the others; locked. */
static int make_comm(int rank_count, int rank, const wsync_nccl_id_t *id,
                     struct wsync_nccl_comm **comm)
{
    struct wsync_nccl_comm *made = calloc(1, sizeof(*made));
    uint8_t uuid[FAKE_UUID_NBYTES];
    int result = made == NULL ? WSYNC_NCCL_SYSTEM_ERROR : read_uuid(uuid);

    if (result != WSYNC_NCCL_SUCCESS) {
        free(made);
        return result;
    }
    made->owner = fake_thread();
    made->rank = rank;
    made->rank_count = rank_count;
    (void)fake_set_busy(made);
    made->world = open_world(id, &made->fd);
    atomic_store(&made->users, 1);
    if (made->world == NULL) {
        fake_drop(made);
        free(made);
        return fake_refuse(WSYNC_NCCL_REMOTE_ERROR, "who made the unique id is gone");
    }
    join(made, uuid);
    made->next = comms;
    comms = made;
    *comm = made;
    return WSYNC_NCCL_SUCCESS;
}

int ncclCommInitRankConfig(wsync_nccl_comm_t *comm, int rank_count, wsync_nccl_id_t id,
                           int rank, wsync_nccl_config_t *config)
{
    int result;

    *comm = NULL;
    if (rank_count > FAKE_MAX_RANKS || rank < 0 || rank >= rank_count ||
        config->magic != WSYNC_NCCL_CONFIG_MAGIC || config->blocking != 0) {
        return WSYNC_NCCL_INVALID_ARGUMENT;
    }
    fake_lock();
    result = make_comm(rank_count, rank, &id, comm);
    fake_unlock();
    return result != WSYNC_NCCL_SUCCESS ? result : WSYNC_NCCL_IN_PROGRESS;
}

/* --- progress ---------------------------------------------------------------------------
 */

/* Whether all ranks are there; those that are must fit together. */
static int look_round(struct wsync_nccl_comm *comm)
{
    const fake_member_t *self = &comm->world->members[comm->rank];
    int joined = 0;

    for (int i = 0; i < FAKE_MAX_RANKS; i++) {
        const fake_member_t *other = &comm->world->members[i];

        if (!atomic_load(&other->joined)) {
            continue;
        }
        joined++;
        if (other->version != self->version) {
            return fake_refuse(WSYNC_NCCL_INVALID_USAGE,
                               "Mismatched NCCL version detected: rank %d has %d, rank %d "
                               "has %d",
                               comm->rank, self->version, i, other->version);
        }
        if (other != self && memcmp(other->uuid, self->uuid, FAKE_UUID_NBYTES) == 0) {
            return fake_refuse(WSYNC_NCCL_INVALID_USAGE,
                               "Duplicate GPU detected: rank %d and rank %d", comm->rank,
                               i);
        }
    }
    return joined < comm->rank_count ? WSYNC_NCCL_IN_PROGRESS : WSYNC_NCCL_SUCCESS;
}

static int progress_init(struct wsync_nccl_comm *comm)
{
    const int result =
        atomic_load(&fake_settings.never) ? WSYNC_NCCL_IN_PROGRESS : look_round(comm);

    if (result == WSYNC_NCCL_SUCCESS) {
        comm->ready = true;
        if (comm->fd >= 0) {
            (void)close(comm->fd);
            comm->fd = -1;
        }
    } else if (result != WSYNC_NCCL_IN_PROGRESS) {
        atomic_store(&comm->error, result);
    }
    return result;
}

int fake_progress(struct wsync_nccl_comm *comm)
{
    int result = atomic_load(&comm->error);

    if (result == WSYNC_NCCL_SUCCESS && !comm->ready) {
        result = progress_init(comm);
    }
    if (result != WSYNC_NCCL_SUCCESS) {
        return result;
    }
    if (comm->polls > 0) {
        comm->polls--;
        return WSYNC_NCCL_IN_PROGRESS;
    }
    if (comm->busy && comm->group != NULL) {
        result = fake_launch(comm);
    }
    comm->busy = false;
    return result;
}

static bool is_alive(const struct wsync_nccl_comm *comm)
{
    const struct wsync_nccl_comm *at = comms;

    while (at != NULL && at != comm) {
        at = at->next;
    }
    return at != NULL && !at->freed;
}

int fake_hold(struct wsync_nccl_comm *comm, const char *call, fake_use_t use)
{
    const long self = fake_thread();
    int result = WSYNC_NCCL_SUCCESS;

    if (!is_alive(comm)) {
        return fake_misuse(WSYNC_NCCL_INVALID_ARGUMENT,
                           "%s: no communicator, or one that was freed", call);
    }
    if (atomic_load(&fake_settings.owner) && comm->owner != self) {
        return fake_misuse(WSYNC_NCCL_INVALID_USAGE,
                           "%s: not the thread that has made the communicator", call);
    }
    if (comm->holder != 0 && comm->holder != self) {
        return fake_misuse(WSYNC_NCCL_INVALID_USAGE,
                           "%s: a second thread, while the first is in %s", call,
                           comm->call);
    }
    if (use == FAKE_COMMUNICATE) {
        result = atomic_load(&comm->error);
        if (comm->busy && result == WSYNC_NCCL_SUCCESS) {
            return fake_misuse(WSYNC_NCCL_INVALID_ARGUMENT,
                               "%s: the communicator is in progress", call);
        }
    }
    if (result == WSYNC_NCCL_SUCCESS && comm->holder == 0) {
        comm->holder = self;
        comm->call = call;
    }
    return result;
}

void fake_let_go(struct wsync_nccl_comm *comm)
{
    comm->holder = 0;
}

int fake_set_busy(struct wsync_nccl_comm *comm)
{
    comm->busy = true;
    comm->polls = POLLS;
    return WSYNC_NCCL_IN_PROGRESS;
}

int ncclCommGetAsyncError(wsync_nccl_comm_t comm, int *result)
{
    bool held;
    int done;

    fake_lock();
    held = is_alive(comm) && comm->holder != 0;
    done = fake_hold(comm, "ncclCommGetAsyncError", FAKE_ASK);
    if (done == WSYNC_NCCL_SUCCESS) {
        *result = fake_progress(comm);
        if (!held) {
            fake_let_go(comm);
        }
    }
    fake_unlock();
    return done;
}

/* --- the end ----------------------------------------------------------------------------
 */

void fake_drop(struct wsync_nccl_comm *comm)
{
    if (atomic_fetch_sub(&comm->users, 1) > 1) {
        return;
    }
    if (comm->world != NULL) {
        (void)munmap(comm->world, sizeof(*comm->world));
    }
    if (comm->fd >= 0) {
        (void)close(comm->fd);
    }
}

int ncclCommAbort(wsync_nccl_comm_t comm)
{
    int result;

    fake_lock();
    result = fake_hold(comm, "ncclCommAbort", FAKE_ASK);
    fake_unlock();
    if (result != WSYNC_NCCL_SUCCESS) {
        return result;
    }
    atomic_store(&comm->stop, true);
    while (atomic_load(&comm->ended) < atomic_load(&comm->begun)) {
        pause_shortly();
    }
    fake_lock();
    fake_work_free(comm->group);
    comm->group = NULL;
    comm->freed = true;
    fake_let_go(comm);
    fake_unlock();
    fake_drop(comm);
    return WSYNC_NCCL_SUCCESS;
}

/* --- what is counted --------------------------------------------------------------------
 */

long fake_communicators(void)
{
    long count = 0;

    for (const struct wsync_nccl_comm *at = comms; at != NULL; at = at->next) {
        count += !at->freed;
    }
    return count;
}

long fake_works(void)
{
    uint64_t count = 0;

    for (const struct wsync_nccl_comm *at = comms; at != NULL; at = at->next) {
        count += at->submitted - atomic_load(&at->ended);
    }
    return (long)count;
}
