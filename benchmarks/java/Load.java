import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.ByteBuffer;
import java.util.Arrays;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.LongAdder;
import java.util.concurrent.locks.LockSupport;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Load through the unmodified Java client, for the benchmarks. Same talk as tests/compatibility/java/Driver.java: a command a
 * line on stdin, JSON lines on stdout; `begin` and `end` tell the caller when to read the server's CPU time.
 */
public final class Load {
    private static final PrintStream OUT = System.out;

    public static void main(String[] arguments) throws Exception {
        System.setOut(System.err);
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] words = line.trim().split(" ");
            Map<String, String> options = new HashMap<>();
            for (int i = 1; i < words.length; i++) {
                int equals = words[i].indexOf('=');
                options.put(words[i].substring(0, equals),
                    java.net.URLDecoder.decode(words[i].substring(equals + 1), "UTF-8"));
            }
            try {
                switch (words[0]) {
                    case "sync": sync(options); break;
                    case "drain": drain(options); break;
                    case "latency": latency(options); break;
                    default: throw new IllegalArgumentException(words[0]);
                }
                emit("done", "count", 0);
            } catch (Throwable error) {
                OUT.println("{\"event\": \"failed\", \"error\": \"" + String.valueOf(error).replaceAll("[\"\\\\\n\r]", " ")
                    + "\"}");
            }
            OUT.flush();
        }
        System.exit(0);
    }

    /** Synchronous sends of 128 B from many threads: warm seconds, then the measured ones. */
    private static void sync(Map<String, String> options) throws Exception {
        DefaultMQProducer producer = producer(options);
        AtomicLong sent = new AtomicLong();
        AtomicLong errors = new AtomicLong();
        long warm = Math.round(Double.parseDouble(options.get("warm_s")) * 1000);
        long measure = Math.round(Double.parseDouble(options.get("measure_s")) * 1000);
        Thread[] threads = new Thread[Integer.parseInt(options.get("threads"))];
        boolean[] stop = {false};
        byte[] body = body();
        for (int i = 0; i < threads.length; i++) {
            threads[i] = new Thread(() -> {
                while (!stop[0]) {
                    try {
                        producer.send(new Message(options.get("topic"), body));
                        sent.incrementAndGet();
                    } catch (Exception error) {
                        errors.incrementAndGet();
                    }
                }
            });
            threads[i].start();
        }
        Thread.sleep(warm);
        emit("begin", "count", sent.get());
        Thread.sleep(measure);
        emit("end", "count", sent.get());
        stop[0] = true;
        for (Thread thread : threads) thread.join(5000);
        emit("errors", "count", errors.get());
        producer.shutdown();
    }

    /**
     * A push consumer drains a backlog through a filter; begin at the first message, end at the last. With `sum` each body
     * begins with a number, and `sum` and `count` tell what came: a hash that any other message changes.
     */
    private static void drain(Map<String, String> options) throws Exception {
        long expect = Long.parseLong(options.get("expect"));
        boolean sums = options.containsKey("sum");
        AtomicLong got = new AtomicLong();
        LongAdder sum = new LongAdder();
        AtomicBoolean ended = new AtomicBoolean();
        CountDownLatch complete = new CountDownLatch(1);
        DefaultMQPushConsumer consumer = consumer(options, (messages, context) -> {
            if (sums) {
                long mine = 0;
                for (MessageExt message : messages) mine += mixed(ByteBuffer.wrap(message.getBody()).getLong());
                sum.add(mine);
            }
            long after = got.addAndGet(messages.size());
            if (after == messages.size()) emit("begin", "count", 0);
            if (after >= expect && ended.compareAndSet(false, true)) {
                emit("end", "count", after);
                complete.countDown();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        tune(consumer, options);
        consumer.start();
        boolean all = complete.await(Long.parseLong(options.get("timeout_s")), TimeUnit.SECONDS);
        if (sums) {
            Thread.sleep(200); // one that comes twice comes soon
            emit("sum", "count", sum.sum());
            emit("came", "count", got.get());
        }
        consumer.shutdown();
        if (!all) throw new IllegalStateException("only " + got.get() + " of " + expect + " came");
    }

    /** splitmix64. */
    private static long mixed(long number) {
        long mixed = number + 0x9E3779B97F4A7C15L;
        mixed = (mixed ^ (mixed >>> 30)) * 0xBF58476D1CE4E5B9L;
        mixed = (mixed ^ (mixed >>> 27)) * 0x94D049BB133111EBL;
        return mixed ^ (mixed >>> 31);
    }

    /** The settings of a push consumer that are named; the others stay RocketMQ's defaults. */
    private static void tune(DefaultMQPushConsumer consumer, Map<String, String> options) {
        if (options.containsKey("span")) consumer.setConsumeConcurrentlyMaxSpan(Integer.parseInt(options.get("span")));
        if (options.containsKey("held")) consumer.setPullThresholdForQueue(Integer.parseInt(options.get("held")));
        if (options.containsKey("pull")) consumer.setPullBatchSize(Integer.parseInt(options.get("pull")));
        if (options.containsKey("list")) {
            consumer.setConsumeMessageBatchMaxSize(Integer.parseInt(options.get("list")));
        }
        if (options.containsKey("consumers")) {
            consumer.setConsumeThreadMin(Integer.parseInt(options.get("consumers")));
            consumer.setConsumeThreadMax(Integer.parseInt(options.get("consumers")));
        }
    }

    /** Paced sends, received by a push consumer: milliseconds from send to listener. */
    private static void latency(Map<String, String> options) throws Exception {
        int rate = Integer.parseInt(options.get("rate"));
        int warm = rate * 3; // the first seconds are the compiler's
        int count = warm + rate * Integer.parseInt(options.get("seconds"));
        long[] took = new long[count];
        AtomicInteger received = new AtomicInteger();
        DefaultMQProducer producer = producer(options);
        DefaultMQPushConsumer consumer = consumer(options, (messages, context) -> {
            long now = System.nanoTime();
            for (MessageExt message : messages) {
                int number = received.getAndIncrement();
                if (number < count) took[number] = now - ByteBuffer.wrap(message.getBody()).getLong();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        Thread.sleep(3000);
        long started = System.nanoTime();
        for (int i = 0; i < count; i++) {
            long due = started + i * 1_000_000_000L / rate;
            while (System.nanoTime() < due) LockSupport.parkNanos(due - System.nanoTime());
            byte[] body = body();
            ByteBuffer.wrap(body).putLong(System.nanoTime());
            producer.send(new Message(options.get("topic"), body));
        }
        for (int i = 0; i < 100 && received.get() < count; i++) Thread.sleep(20);
        consumer.shutdown();
        producer.shutdown();
        int whole = Math.min(count, received.get());
        long[] sorted = Arrays.copyOfRange(took, Math.min(warm, whole), whole);
        Arrays.sort(sorted);
        if (sorted.length == 0) throw new IllegalStateException("nothing came");
        emit("p50_us", "count", sorted[sorted.length / 2] / 1000);
        emit("p99_us", "count", sorted[(int) (sorted.length * 0.99)] / 1000);
        emit("missing", "count", count - received.get());
    }

    private static DefaultMQProducer producer(Map<String, String> options) throws Exception {
        DefaultMQProducer producer = configured(new DefaultMQProducer("load-producer"), options);
        producer.setSendMsgTimeout(10_000);
        producer.start();
        return producer;
    }

    private static DefaultMQPushConsumer consumer(Map<String, String> options, MessageListenerConcurrently listener)
            throws Exception {
        DefaultMQPushConsumer consumer =
            configured(new DefaultMQPushConsumer("load-" + System.nanoTime()), options);
        boolean backlog = options.containsKey("tag") || options.containsKey("sql");
        consumer.setConsumeFromWhere(
            backlog ? ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET : ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET);
        if (options.containsKey("sql")) {
            consumer.subscribe(options.get("topic"), MessageSelector.bySql(options.get("sql")));
        } else {
            consumer.subscribe(options.get("topic"), options.getOrDefault("tag", "*"));
        }
        consumer.registerMessageListener(listener);
        return consumer;
    }

    private static <T extends ClientConfig> T configured(T client, Map<String, String> options) {
        client.setNamesrvAddr(options.get("ns"));
        client.setClientIP("127.0.0.1");
        client.setInstanceName("load-" + System.nanoTime());
        client.setVipChannelEnabled(false);
        return client;
    }

    private static byte[] body() {
        byte[] body = new byte[128];
        Arrays.fill(body, (byte) 'x');
        return body;
    }

    private static void emit(String event, String key, long value) {
        synchronized (OUT) {
            OUT.println("{\"event\": \"" + event + "\", \"" + key + "\": " + value + "}");
            OUT.flush();
        }
    }
}
