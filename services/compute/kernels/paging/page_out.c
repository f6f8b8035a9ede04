// Moves the memory that only this process has into a file. The file's pages take its place: the system keeps them in its page
// cache, drops them when it needs memory, and brings back those that the process touches. A page that the process writes to
// becomes its own again, so the file never changes.
//
// No thread may write to a page between its copy and its replacement. So all other threads wait in a signal handler meanwhile,
// and the caller writes to its stack and to shared memory alone, neither of which moves.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <linux/magic.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#define RUN (64 << 10)   // bytes: shorter runs of pages stay, and runs with a shorter gap are moved as one
#define SIGNAL SIGURG    // ignored by default, so one that arrives late does no harm
#define LOOKS 20000      // at the threads that have not stopped yet, each after LOOK_NS: 2 s
#define LOOK_NS 100000
#define MOST_THREADS 1024
#define MOST_SPANS 16384
#define ENTRIES 512      // of the page map that are read at once

typedef struct {
    uintptr_t start, stop;
    int protection;
    int whole; // every page moves: it is in a file of an earlier call, which can then be removed
} span;

// Shared memory, which does not move. It stays for the next call, and for threads that the signal reaches late.
typedef struct {
    atomic_uint resumed;                // a futex
    atomic_long n_stacks, stopped;      // `stopped`: threads in the handler
    uintptr_t stacks[MOST_THREADS + 2]; // an address in each memory that threads use meanwhile
    long n_signalled, n_spans;
    int signalled[MOST_THREADS]; // thread ids
    _Alignas(65536) span spans[MOST_SPANS];
    char maps[4 << 20]; // text of /proc/self/maps
} stage;

static stage *shared;

static void keep(stage *s, const void *address) {
    long place = atomic_fetch_add(&s->n_stacks, 1);
    if (place < MOST_THREADS + 2) s->stacks[place] = (uintptr_t)address;
}

static void wait_resumed(int number) {
    (void)number;
    int before = errno;
    stage *s = shared;
    keep(s, &before);
    atomic_fetch_add(&s->stopped, 1);
    while (!atomic_load(&s->resumed)) syscall(SYS_futex, &s->resumed, FUTEX_WAIT, 0, 0, 0, 0);
    atomic_fetch_sub(&s->stopped, 1);
    errno = before;
}

static void look_later(void) { nanosleep(&(struct timespec){.tv_nsec = LOOK_NS}, 0); }

static int is_signalled(const stage *s, int thread) {
    for (long i = 0; i < s->n_signalled; i++)
        if (s->signalled[i] == thread) return 1;
    return 0;
}

// Signals the threads that have not been signalled yet, and returns how many others there are, or -errno.
static long signal_others(stage *s, int tasks) {
    struct {
        uint64_t inode;
        int64_t next;
        unsigned short length;
        unsigned char type;
        char name[];
    } *entry;
    _Alignas(8) char buffer[8192];
    int process = getpid(), self = (int)syscall(SYS_gettid);
    long others = 0, n_bytes;
    lseek(tasks, 0, SEEK_SET);
    while ((n_bytes = syscall(SYS_getdents64, tasks, buffer, sizeof buffer)) > 0)
        for (long at = 0; at < n_bytes; at += entry->length) {
            entry = (void *)(buffer + at);
            int thread = 0;
            for (const char *digit = entry->name; *digit >= '0' && *digit <= '9'; digit++) thread = 10 * thread + *digit - '0';
            if (!thread || thread == self) continue;
            others++;
            if (is_signalled(s, thread)) continue;
            if (s->n_signalled == MOST_THREADS) return -EAGAIN;
            s->signalled[s->n_signalled++] = thread;
            syscall(SYS_tgkill, process, thread, SIGNAL);
        }
    return n_bytes < 0 ? -errno : others;
}

// Returns once all other threads wait in the handler; a thread that starts or ends meanwhile is noticed by their number.
static int stop_others(stage *s, int tasks) {
    for (int look = 0; look < LOOKS; look++) {
        long others = signal_others(s, tasks);
        if (others < 0) return (int)others;
        if (atomic_load(&s->stopped) == others) {
            long again = signal_others(s, tasks);
            if (again == others && atomic_load(&s->stopped) == others) return 0;
        }
        look_later();
    }
    return -ETIMEDOUT;
}

static void resume_others(stage *s) {
    atomic_store(&s->resumed, 1);
    syscall(SYS_futex, &s->resumed, FUTEX_WAKE, INT32_MAX, 0, 0, 0);
    for (int look = 0; look < LOOKS && atomic_load(&s->stopped); look++) look_later();
}

static uintptr_t read_hex(const char **text) {
    uintptr_t number = 0;
    for (;; (*text)++) {
        char c = **text;
        if (c >= '0' && c <= '9')
            number = 16 * number + (uintptr_t)(c - '0');
        else if (c >= 'a' && c <= 'f')
            number = 16 * number + (uintptr_t)(c - 'a' + 10);
        else
            return number;
    }
}

static int is_kept(const stage *s, uintptr_t start, uintptr_t stop) {
    long n = atomic_load(&s->n_stacks);
    for (long i = 0; i < n; i++)
        if (start <= s->stacks[i] && s->stacks[i] < stop) return 1;
    return 0;
}

// Notes a line of /proc/self/maps, such as "7f00-7f80 rw-p 00000000 00:00 0    [heap]", if its memory may move.
static int note(stage *s, const char *line, const char *moved) {
    uintptr_t start = read_hex(&line);
    line++;
    uintptr_t stop = read_hex(&line);
    const char *access = line + 1, *path = strpbrk(line, "/[");
    if (access[0] != 'r' || access[2] != '-' || access[3] != 'p') return 0; // unreadable, code, or shared
    if (path && *path == '[' && strncmp(path, "[heap]", 6) && strncmp(path, "[anon", 5)) return 0; // stack, vvar
    if (is_kept(s, start, stop)) return 0;
    if (s->n_spans == MOST_SPANS) return -ENOBUFS;
    int protection = PROT_READ | (access[1] == 'w' ? PROT_WRITE : 0);
    s->spans[s->n_spans++] = (span){start, stop, protection, path && strstr(path, moved) != 0};
    return 0;
}

static int note_spans(stage *s, int maps, const char *moved) {
    size_t length = 0;
    ssize_t n_bytes;
    while ((n_bytes = read(maps, s->maps + length, sizeof s->maps - 1 - length)) > 0) length += (size_t)n_bytes;
    if (n_bytes < 0) return -errno;
    if (length == sizeof s->maps - 1) return -ENOBUFS;
    s->maps[length] = 0;
    for (char *line = s->maps, *end; (end = strchr(line, '\n')); line = end + 1) {
        *end = 0;
        int failed = note(s, line, moved);
        if (failed) return failed;
    }
    return 0;
}

// Writes the pages to the file at `at`, and maps them from there. Returns 0 or -errno; the pages are then as they were.
static int move(int file, long at, uintptr_t start, uintptr_t stop, int protection) {
    for (uintptr_t next = start; next < stop;) {
        // pwrite() notes in the thread's own memory that it may be cancelled
        ssize_t n_bytes = syscall(SYS_pwrite64, file, next, stop - next, at + (long)(next - start));
        if (n_bytes <= 0) return n_bytes ? -errno : -EIO;
        next += (uintptr_t)n_bytes;
    }
    void *mapped = mmap((void *)start, stop - start, protection, MAP_PRIVATE | MAP_FIXED, file, at);
    return mapped == MAP_FAILED ? -errno : 0;
}

static int is_own(uint64_t entry) {
    const uint64_t present = 1ull << 63, swapped = 1ull << 62, of_file = 1ull << 61;
    return (entry & (present | swapped)) && !(entry & of_file);
}

// Moves runs of a span's pages. Returns the file's new end, or -errno.
static long move_span(int file, long end, int pagemap, const span *s, uintptr_t page) {
    uint64_t entries[ENTRIES];
    uintptr_t first = 0, last = 0; // the run so far: [first, last)
    for (uintptr_t at = s->start; at < s->stop; at += ENTRIES * page) {
        long left = (long)((s->stop - at) / page), n = left < ENTRIES ? left : ENTRIES;
        ssize_t n_bytes = pread(pagemap, entries, (size_t)n * sizeof *entries, (long)(at / page * sizeof *entries));
        if (n_bytes != n * (ssize_t)sizeof *entries) return n_bytes < 0 ? -errno : -EIO;
        for (long i = 0; i < n; i++) {
            if (!s->whole && !is_own(entries[i])) continue;
            uintptr_t address = at + (uintptr_t)i * page;
            if (first && address - last >= RUN) {
                if (last - first >= RUN) {
                    int failed = move(file, end, first, last, s->protection);
                    if (failed) return failed;
                    end += (long)(last - first);
                }
                first = 0;
            }
            if (!first) first = address;
            last = address + page;
        }
    }
    if (!first || (last - first < RUN && !s->whole)) return end;
    int failed = move(file, end, first, last, s->protection);
    return failed ? failed : end + (long)(last - first);
}

static long move_spans(stage *s, int file, int maps, int pagemap, const char *moved) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    long end = note_spans(s, maps, moved);
    for (long i = 0; i < s->n_spans && end >= 0; i++) end = move_span(file, end, pagemap, &s->spans[i], page);
    return end;
}

static long move_alone(stage *s, int file, int tasks, int maps, int pagemap, const char *moved) {
    struct sigaction handler = {.sa_handler = wait_resumed, .sa_flags = SA_RESTART}, before;
    sigset_t all, unblocked;
    sigfillset(&handler.sa_mask);
    sigfillset(&all);
    keep(s, &all);   // the caller's stack
    keep(s, &errno); // and its other memory of a thread
    pthread_sigmask(SIG_SETMASK, &all, &unblocked); // a handler of the caller's would write to memory
    sigaction(SIGNAL, &handler, &before);
    long result = stop_others(s, tasks);
    if (!result) result = move_spans(s, file, maps, pagemap, moved);
    resume_others(s);
    sigaction(SIGNAL, &before, 0);
    pthread_sigmask(SIG_SETMASK, &unblocked, 0);
    return result;
}

static stage *begin(void) {
    if (!shared) {
        void *mapped = mmap(0, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (mapped == MAP_FAILED) return 0;
        shared = mapped;
    }
    atomic_store(&shared->resumed, 0);
    atomic_store(&shared->n_stacks, 0);
    atomic_store(&shared->stopped, 0);
    shared->n_signalled = shared->n_spans = 0;
    return shared;
}

// Moves the process's own memory into `file`, which is empty and has room behind its end for mappings that grow. Files of
// earlier calls have `moved` in their paths, and are not needed any more. Returns the number of bytes, or -errno; memory
// that has not moved is as it was. One thread at a time may call it.
__attribute__((visibility("default"))) long rz_page_out(int file, const char *moved) {
    struct statfs system;
    if (fstatfs(file, &system)) return -errno;
    if (system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC) return -EOPNOTSUPP;
    int tasks = open("/proc/self/task", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int maps = open("/proc/self/maps", O_RDONLY | O_CLOEXEC), pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    stage *s = tasks < 0 || maps < 0 || pagemap < 0 ? 0 : begin();
    long result = s ? move_alone(s, file, tasks, maps, pagemap, moved) : -errno;
    if (s) madvise(s->spans, sizeof *s - offsetof(stage, spans), MADV_REMOVE);
    for (int i = 0, opened[] = {tasks, maps, pagemap}; i < 3; i++)
        if (opened[i] >= 0) close(opened[i]);
    return result;
}
