/* The hot path of a jail in C: the life of one call in a slot. (The memory snapshot of a zygote: _snapshot.c.)
 *
 * Optional: without it slot.py and guest.py do the same in Python, only slower. It is a plain shared library for ctypes,
 * built by `python -m sandbox.inside.native`; nothing of Python's C interface is used.
 *
 * What it promises
 * - `serve` returns in the child of a call only, as the guest: descriptors {0, 1, 2}, no capabilities, limits set, second
 *   filter on. In the slot it never returns: it ends the process when the host is gone and on any error.
 * - Verdicts as in slot.py: from the kernel; a report leaves when every process of the call is dead.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define LAST_WORDS (SIGRTMAX - 1) /* main_program.py */
#define LAST_WORDS_S 0.05

struct request { /* slot.py: REQUEST */
    double wall_s, cpu_s;
    int64_t memory_bytes, output_bytes, processes, disk_bytes, stdin_bytes, code_bytes, display_bytes, seed;
};

struct served { /* slot.py: _serve_natively */
    int64_t stdin_bytes, code_bytes, display_bytes, seed, board;
};

struct report { /* slot.py: REPORT */
    int64_t ended, status;
    double wall_s, cpu_s;
    int64_t peak_memory_bytes;
};

struct slot { /* native.py: Slot */
    int control, self, uid;
    int64_t image_bytes;
    const char *home;
    const struct sock_fprog *filter;
};

struct home {
    int64_t disk_bytes;
    struct timespec changed, modified, accessed;
    unsigned mode, owner, group; /* kernels before 6.13 change a ctime only every few ms */
    unsigned long links, inodes, blocks;
};

static void check(int failed, const char *what) {
    if (failed) {
        dprintf(2, "slot: %s: %s\n", what, strerror(errno));
        _exit(1);
    }
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

static double seconds(struct timeval time) { return time.tv_sec + time.tv_usec * 1e-6; }

/* Receives one message and at most one descriptor (-1 without); the size, 0 when the host is gone. */
static ssize_t receive(int control, void *data, size_t size, int *fd) {
    union { struct cmsghdr header; char space[CMSG_SPACE(sizeof(int))]; } ancillary;
    struct iovec part = {data, size};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &ancillary,
                             .msg_controllen = sizeof ancillary};
    ssize_t got;
    *fd = -1;
    do got = recvmsg(control, &message, MSG_CMSG_CLOEXEC);
    while (got < 0 && errno == EINTR);
    check(got < 0, "recvmsg");
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header && header->cmsg_type == SCM_RIGHTS) memcpy(fd, CMSG_DATA(header), sizeof *fd);
    return got;
}

static void answer(int control, struct report *report, int *fds, int count) {
    union { struct cmsghdr header; char space[CMSG_SPACE(3 * sizeof(int))]; } ancillary = {0};
    struct iovec part = {report, sizeof *report};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &ancillary,
                             .msg_controllen = CMSG_SPACE(count * sizeof(int))};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(count * sizeof(int));
    memcpy(CMSG_DATA(header), fds, count * sizeof(int));
    if (sendmsg(control, &message, MSG_NOSIGNAL) < 0) _exit(0); /* the host is gone */
}

static struct home home_state(const char *path, int64_t disk_bytes) {
    struct stat root;
    struct statvfs used;
    check(stat(path, &root) || statvfs(path, &used), "stat of the call's file system");
    return (struct home){disk_bytes, root.st_ctim, root.st_mtim, root.st_atim, root.st_mode, root.st_uid,
                         root.st_gid, root.st_nlink, used.f_ffree, used.f_bfree};
}

static int same_time(struct timespec a, struct timespec b) { return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec; }

static int same(struct home a, struct home b) {
    return a.disk_bytes == b.disk_bytes && same_time(a.changed, b.changed) && same_time(a.modified, b.modified) &&
           same_time(a.accessed, b.accessed) && a.mode == b.mode && a.owner == b.owner && a.group == b.group &&
           a.links == b.links && a.inodes == b.inodes && a.blocks == b.blocks;
}

static struct home mount_home(const struct slot *slot, int64_t disk_bytes) {
    char options[160];
    int owner = slot->uid < 0 ? 0 : slot->uid;
    snprintf(options, sizeof options, "size=%ld,nr_inodes=4096,mode=0700,uid=%d,gid=%d", (long)disk_bytes, owner, owner);
    check(mount("tmpfs", slot->home, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOATIME, options), "mount");
    return home_state(slot->home, disk_bytes);
}

/* PID 1 of a call's namespace: shares the slot's memory, ignores SIGCHLD (the kernel then reaps orphans), sleeps. All
 * signals are blocked: where guest code has its id, it could run a handler of the interpreter in the slot's memory. */
static int sleep_as_init(void *unused) {
    (void)unused;
    signal(SIGCHLD, SIG_IGN);
    for (;;) pause();
    return 0;
}

/* Or what this machine allows, where that is less: to ask for more would be refused. */
static void limit(int kind, rlim_t soft, rlim_t hard) {
    struct rlimit most;
    check(getrlimit(kind, &most), "getrlimit");
    most.rlim_max = hard < most.rlim_max ? hard : most.rlim_max;
    most.rlim_cur = soft < most.rlim_max ? soft : most.rlim_max;
    check(setrlimit(kind, &most), "setrlimit");
}

/* In the child: from here to the end of `serve` it becomes the guest. guest.py: start. */
static void become_guest(const struct slot *slot, const struct request *request, int source, int out, int err) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct none[2] = {{0}};
    rlim_t cpu = (rlim_t)request->cpu_s + (request->cpu_s > (rlim_t)request->cpu_s);
    rlim_t file = request->disk_bytes > request->output_bytes ? request->disk_bytes : request->output_bytes;
    rlim_t space = request->memory_bytes + slot->image_bytes;
    check(dup2(source, 0) < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0, "dup2");
    check(syscall(SYS_close_range, 3, ~0U, 0), "close_range");
    limit(RLIMIT_CPU, cpu, cpu + 1); /* SIGXCPU first; SIGKILL for code that ignores it */
    limit(RLIMIT_AS, space, space);
    limit(RLIMIT_FSIZE, file, file);
    limit(RLIMIT_NPROC, request->processes, request->processes);
    limit(RLIMIT_NOFILE, 256, 256);
    limit(RLIMIT_MEMLOCK, 65536, 65536);
    limit(RLIMIT_SIGPENDING, 1024, 1024);
    limit(RLIMIT_MSGQUEUE, 0, 0);
    check(setsid() < 0, "setsid"); /* or a signal to its process group would reach the slot, where both have the same id */
    if (slot->uid >= 0) check(setresgid(slot->uid, slot->uid, slot->uid) || setresuid(slot->uid, slot->uid, slot->uid), "setresuid");
    check(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "prctl");
    check(syscall(SYS_capset, &header, none), "capset");
    check(chdir(slot->home), "chdir");
    check(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, slot->filter, 0, 0), "seccomp");
}

/* Waits for the end of the child (0), the wall limit (1), or a cancellation or the end of the host (2). */
static int64_t watch(int control, pid_t child, double wall_s) {
    double until = now() + wall_s, left;
    int pidfd = syscall(SYS_pidfd_open, child, 0);
    check(pidfd < 0, "pidfd_open");
    struct pollfd waits[2] = {{pidfd, POLLIN, 0}, {control, POLLIN, 0}};
    while ((left = until - now()) > 0 && poll(waits, 2, (int)(left * 1000) + 1) < 0) check(errno != EINTR, "poll");
    close(pidfd);
    return waits[0].revents ? 0 : waits[1].revents ? 2 : 1;
}

static void run_call(const struct slot *slot, const struct request *request, struct report *report, pid_t init, pid_t child,
                     double started) {
    struct rusage usage;
    pid_t dead;
    int status;
    report->ended = watch(slot->control, child, request->wall_s);
    if (report->ended == 1) { /* at the wall limit: it may still write out what it has printed */
        kill(child, LAST_WORDS);
        watch(slot->control, child, LAST_WORDS_S);
    }
    report->wall_s = now() - started;
    kill(init, SIGKILL); /* takes the whole namespace down */
    if (report->wall_s > 1.0 && send(slot->control, "ended", 5, MSG_NOSIGNAL) < 0) _exit(0); /* slot.py: LONG_S, ENDED */
    while ((dead = wait4(-1, &status, __WALL, &usage)) > 0 || errno == EINTR) { /* all: code may have made us siblings */
        if (dead != child) continue;
        report->status = status;
        report->cpu_s = seconds(usage.ru_utime) + seconds(usage.ru_stime);
        report->peak_memory_bytes = usage.ru_maxrss * 1024;
    }
}

/* Serves the calls of one slot. In the child of a call it fills `served` and returns; nothing returns in the slot. */
void serve(const struct slot *slot, struct served *served) {
    static char stack[16384] __attribute__((aligned(16)));
    struct home home = {.disk_bytes = -1};
    struct request space, *request = &space;
    for (;;) {
        int fds[3], count = 2, source;
        sigset_t all, before;
        ssize_t got = receive(slot->control, request, sizeof *request, &source);
        if (got == 0) _exit(0);
        if (source < 0) continue; /* the cancellation of a call that has just ended */
        check(got != sizeof *request, "request");
        fds[0] = memfd_create("stdout", MFD_CLOEXEC);
        fds[1] = memfd_create("stderr", MFD_CLOEXEC);
        if (request->display_bytes) {
            fds[count++] = memfd_create("display", MFD_CLOEXEC);
            check(ftruncate(fds[2], request->display_bytes), "ftruncate");
        }
        if (home.disk_bytes != request->disk_bytes) {
            if (home.disk_bytes >= 0) check(umount2(slot->home, MNT_DETACH), "umount");
            home = mount_home(slot, request->disk_bytes);
        }
        check(unshare(CLONE_NEWPID), "unshare");
        sigfillset(&all);
        sigprocmask(SIG_SETMASK, &all, &before);
        pid_t init = clone(sleep_as_init, stack + sizeof stack, CLONE_VM | SIGCHLD, NULL);
        check(init < 0, "clone");
        sigprocmask(SIG_SETMASK, &before, NULL);
        double started = now();
        pid_t child = _Fork(); /* no handlers that run at a fork: this process has one thread */
        check(child < 0, "fork");
        if (child == 0) {
            void *board = NULL;
            if (count == 3) {
                board = mmap(NULL, request->display_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fds[2], 0);
                check(board == MAP_FAILED, "mmap");
            }
            become_guest(slot, request, source, fds[0], fds[1]);
            *served = (struct served){request->stdin_bytes, request->code_bytes, request->display_bytes, request->seed,
                                      (int64_t)board};
            return;
        }
        struct report report = {0};
        run_call(slot, request, &report, init, child, started);
        check(setns(slot->self, CLONE_NEWPID), "setns"); /* or the next unshare would be refused */
        answer(slot->control, &report, fds, count);
        close(source);
        for (int i = 0; i < count; i++) close(fds[i]);
        if (!same(home, home_state(slot->home, request->disk_bytes))) {
            check(umount2(slot->home, MNT_DETACH), "umount"); /* after the reply: it may wait for the kernel */
            home.disk_bytes = -1;
        }
    }
}
