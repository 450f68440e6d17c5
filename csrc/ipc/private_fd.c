/* SPDX-License-Identifier: Apache-2.0 */
#include "ipc/private_fd.h"

#include <pthread.h>
#include <stddef.h>
#include <unistd.h>

static struct {
    pthread_mutex_t mutex;
    pthread_once_t watched;
    wsync_private_fd_t *first;
} open_fds = {.mutex = PTHREAD_MUTEX_INITIALIZER,  // NOLINT(cppcoreguidelines-*)
              .watched = PTHREAD_ONCE_INIT};

static void lock(void)
{
    (void)pthread_mutex_lock(&open_fds.mutex);
}

static void unlock(void)
{
    (void)pthread_mutex_unlock(&open_fds.mutex);
}

/* The numbers may soon stand for other files of the child's: those who have them let go. */
static void close_in_child(void)
{
    wsync_private_fd_t *next;

    for (wsync_private_fd_t *item = open_fds.first; item != NULL; item = next) {
        next = item->next;
        (void)close(item->fd);
        *item = (wsync_private_fd_t){.fd = -1};
    }
    open_fds.first = NULL;
    unlock();
}

/* Without memory for it, forks keep them. */
static void watch_forks(void)
{
    (void)pthread_atfork(lock, unlock, close_in_child);
}

void wsync_private_fd_take(wsync_private_fd_t *self, int fd)
{
    (void)pthread_once(&open_fds.watched, watch_forks);
    lock();
    *self = (wsync_private_fd_t){.fd = fd, .next = open_fds.first};
    if (self->next != NULL) {
        self->next->previous = self;
    }
    open_fds.first = self;
    unlock();
}

void wsync_private_fd_close(wsync_private_fd_t *self)
{
    if (self->fd < 0) {
        return;
    }
    lock();
    if (self->previous != NULL) {
        self->previous->next = self->next;
    } else {
        open_fds.first = self->next;
    }
    if (self->next != NULL) {
        self->next->previous = self->previous;
    }
    (void)close(self->fd);
    self->fd = -1;
    unlock();
}
