/* The memory snapshot of a zygote: makes each fork of it cheap. Built together with _native.c.
 *
 * What it promises
 * - `forget`, `keep` and `snapshot` change no byte of the process.
 * - After `snapshot` a fork copies no page tables of what is covered, and what a call uses of the libraries' text and
 *   constants is mapped from its start. Reading from a file, a call would pay a page fault for each 64 KiB.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096UL
#define HUGE (2UL << 20)
#define RANGES 8192
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif

struct range {
    unsigned long start, end;
    int protection, file;
};

struct ranges {
    int count;
    struct range list[RANGES];
};

static struct ranges written, constant, covered; /* constant: text and constants of libraries, as their files have them */

static void add(struct ranges *ranges, struct range range) {
    if (range.start < range.end && ranges->count < RANGES) ranges->list[ranges->count++] = range;
}

/* Parses smaps, a text ended by 0: every private mapping that can be read, the stack and the kernel's own excepted. */
static void find(char *text) {
    struct range current = {0};
    int skip = 1;
    written.count = constant.count = covered.count = 0;
    for (char *line = text, *end; (end = strchr(line, '\n')); line = end + 1) {
        char permissions[5];
        unsigned long first, last, inode;
        *end = 0;
        if (sscanf(line, "%lx-%lx %4s %*x %*x:%*x %lu", &first, &last, permissions, &inode) == 4) {
            skip = permissions[0] != 'r' || permissions[3] != 'p' || strstr(line, "[stack]") || strstr(line, "[v");
            int protection = PROT_READ | (permissions[1] == 'w' ? PROT_WRITE : 0) | (permissions[2] == 'x' ? PROT_EXEC : 0);
            current = (struct range){first, last, protection, inode != 0};
        } else if (!skip && !strncmp(line, "Anonymous:", 10)) {
            struct range *before = constant.list + constant.count - 1;
            if (atol(line + 10) > 0) add(&written, current);
            else if (!current.file || current.protection & PROT_WRITE) continue;
            else if (constant.count && before->end == current.start) before->end = current.end;
            else add(&constant, current);
        }
    }
}

/* Unmaps all constants: what is mapped later has been used in between. */
void forget(char *text) {
    find(text);
    for (int i = 0; i < constant.count; i++)
        madvise((void *)constant.list[i].start, constant.list[i].end - constant.list[i].start, MADV_DONTNEED);
}

/* Adds what of the range cannot be gathered into huge pages. In a child, a write to a huge page copies 4 KiB as elsewhere,
 * but reading it takes no page fault, and so each page that is read and then written takes one fault instead of two. */
static void gather(struct range range) {
    struct range rest = range;
    for (unsigned long at = (range.start + HUGE - 1) & -HUGE; at + HUGE <= range.end; at += HUGE)
        if (!madvise((void *)at, HUGE, MADV_COLLAPSE)) {
            rest.end = at;
            add(&covered, rest);
            rest = range;
            rest.start = at + HUGE;
        }
    add(&covered, rest);
}

/* Free addresses for huge pages, or NULL. */
static char *reserve(unsigned long size) {
    char *space = mmap(NULL, size + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED) return NULL;
    char *first = (char *)(((unsigned long)space + HUGE - 1) & -HUGE);
    munmap(space, first - space);
    munmap(first + size, space + HUGE - first);
    return first;
}

/* Puts a huge page with the same content in place of constants; whether it could. */
static int replace(unsigned long at) {
    char *page = reserve(HUGE);
    if (!page) return 0;
    memcpy(page, (void *)at, HUGE);
    if (!madvise(page, HUGE, MADV_COLLAPSE) && !mprotect(page, HUGE, PROT_READ | PROT_EXEC) &&
        mremap(page, HUGE, HUGE, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)at) == (void *)at)
        return 1;
    munmap(page, HUGE);
    return 0;
}

static long used(int pagemap, uint64_t *entries, unsigned long at, unsigned long size) {
    long count = 0, pages = pread(pagemap, entries, size / PAGE * 8, at / PAGE * 8) / 8;
    for (long i = 0; i < pages; i++) count += entries[i] >> 63;
    return count;
}

/* Makes the constants in use memory of this process, which a fork maps in the child at once: huge pages where many are in
 * use side by side; elsewhere, if `all`, single pages, each of which makes a fork a little dearer. */
static void take_over(struct range range, int pagemap, int all) {
    static uint64_t entries[HUGE / PAGE];
    for (unsigned long at = range.start, next; at < range.end; at = next) {
        next = (at + HUGE) & -HUGE;
        if (next > range.end) next = range.end;
        long count = used(pagemap, entries, at, next - at);
        if (next - at == HUGE && count >= 64 && replace(at)) continue;
        if (!all || !count || mprotect((void *)at, next - at, PROT_READ | PROT_WRITE | PROT_EXEC)) continue;
        for (volatile char *page = (char *)at; page < (char *)next; page += PAGE)
            if (entries[((unsigned long)page - at) / PAGE] >> 63) *page = *page;
        mprotect((void *)at, next - at, PROT_READ | PROT_EXEC);
    }
}

/* Makes huge pages of the constants in use since `forget`. */
void keep(char *text, int pagemap) {
    find(text);
    for (int i = 0; i < constant.count; i++) take_over(constant.list[i], pagemap, 0);
}

/* Makes a fork of this process cheap: constants become its own memory; what it wrote so far moves into huge pages or, where
 * that cannot be, into a sealed memory file that is mapped privately in the same place. `text` is /proc/self/smaps, writable
 * and ended by 0; `pagemap` /proc/self/pagemap. Returns the bytes in the file, or -errno with the content unchanged. */
long snapshot(char *text, int pagemap) {
    static const char zeros[PAGE];
    unsigned long total = 0, offset = 0;
    find(text);
    for (int i = 0; i < constant.count; i++) take_over(constant.list[i], pagemap, 1);
    for (int i = 0; i < written.count; i++)
        if (written.list[i].file) add(&covered, written.list[i]);
        else gather(written.list[i]);
    for (int i = 0; i < covered.count; i++) total += covered.list[i].end - covered.list[i].start;
    int fd = memfd_create("snapshot", MFD_ALLOW_SEALING | MFD_CLOEXEC);
    total = (total + HUGE - 1) & -HUGE;
    char *copy = fd < 0 || ftruncate(fd, total) ? NULL : reserve(total);
    if (!copy || mmap(copy, total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) != copy) {
        int error = errno;
        close(fd);
        return -error;
    }
    for (int i = 0; i < covered.count; i++)
        for (unsigned long at = covered.list[i].start; at < covered.list[i].end; at += PAGE, offset += PAGE)
            if (memcmp((void *)at, zeros, PAGE)) memcpy(copy + offset, (void *)at, PAGE);
    madvise(copy, total, MADV_COLLAPSE); /* the kernel then handles its pages many at a time */
    munmap(copy, total);
    offset = 0;
    for (int i = 0; i < covered.count; i++) { /* no call that writes to covered memory between the copy above and this */
        struct range range = covered.list[i];
        void *wanted = (void *)range.start;
        unsigned long length = range.end - range.start;
        if (mmap(wanted, length, range.protection, MAP_PRIVATE | MAP_FIXED, fd, offset) != wanted) abort();
        offset += length;
    }
    /* an open, writable descriptor would let one call poison all others */
    fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    close(fd);
    return total;
}
