import java.io.BufferedReader;
import java.io.Closeable;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.net.URLDecoder;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Collections;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientConfigurationBuilder;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.StaticSessionCredentialsProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.FilterExpressionType;
import org.apache.rocketmq.client.apis.consumer.PushConsumer;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.SendReceipt;
import org.apache.rocketmq.client.apis.producer.Transaction;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;

/** Drives the unmodified Java client that speaks gRPC; the words are described in peer/official.py. */
public final class Official {
    private static final PrintStream OUT = System.out;
    private static final long SETTLE_MS = 400;
    private static final ClientServiceProvider PROVIDER = ClientServiceProvider.loadService();
    private static final Map<String, SimpleConsumer> CONSUMERS = new HashMap<>();
    private static final Map<String, Closeable> OPEN = new HashMap<>();
    private static final Map<String, MessageView> RECEIVED = new HashMap<>();

    private final Map<String, String> options = new HashMap<>();

    private Official(String[] words) throws Exception {
        for (int i = 1; i < words.length; i++) {
            int equals = words[i].indexOf('=');
            options.put(words[i].substring(0, equals), URLDecoder.decode(words[i].substring(equals + 1), "UTF-8"));
        }
    }

    public static void main(String[] arguments) throws Exception {
        System.setOut(System.err);
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] words = line.trim().split(" ");
            try {
                new Official(words).run(words[0]);
                emit("done");
            } catch (Throwable error) {
                emit("failed", "error", String.valueOf(error));
            }
        }
        Runtime.getRuntime().halt(0);
    }

    private void run(String command) throws Exception {
        switch (command) {
            case "send": send(); break;
            case "recall": recall(); break;
            case "transact": transact(); break;
            case "open": open(); break;
            case "receive": receive(); break;
            case "ack": ack(); break;
            case "hide": hide(); break;
            case "close": OPEN.remove(options.get("name")).close(); break;
            case "push": push(); break;
            default: throw new IllegalArgumentException(command);
        }
    }

    private ClientConfiguration configuration() {
        ClientConfigurationBuilder builder = ClientConfiguration.newBuilder().setEndpoints(options.get("ep"));
        if (options.containsKey("ak")) {
            builder.setCredentialProvider(new StaticSessionCredentialsProvider(options.get("ak"), options.get("sk")));
        }
        return builder.setRequestTimeout(Duration.ofSeconds(10)).build();
    }

    // ---- producing

    private void send() throws Exception {
        try (Producer producer = PROVIDER.newProducerBuilder()
            .setClientConfiguration(configuration()).setTopics(options.get("topic")).build()) {
            for (int i = 0; i < number("count", 1); i++) {
                Message message = message(i);
                sent(message, producer.send(message));
            }
        }
    }

    private Message message(int i) {
        String body = text("prefix", "m") + "-" + i;
        MessageBuilder builder = PROVIDER.newMessageBuilder().setTopic(options.get("topic")).setKeys(body)
            .setBody(body.getBytes(StandardCharsets.UTF_8)).addProperty("n", String.valueOf(i));
        if (options.containsKey("tags")) {
            String[] tags = options.get("tags").split(",");
            builder.setTag(tags[i % tags.length]);
        }
        if (options.containsKey("keyed")) builder.setMessageGroup("group-" + i % number("keyed", 1));
        if (options.containsKey("delay_ms")) {
            builder.setDeliveryTimestamp(System.currentTimeMillis() + number("delay_ms", 0));
        }
        return builder.build();
    }

    private static void sent(Message message, SendReceipt receipt) {
        emit("sent", "body", body(message.getBody()), "id", receipt.getMessageId(),
            "handle", receipt.getRecallHandle(), "ms", System.currentTimeMillis());
    }

    private void recall() throws Exception {
        try (Producer producer = PROVIDER.newProducerBuilder()
            .setClientConfiguration(configuration()).setTopics(options.get("topic")).build()) {
            emit("recalled", "id", producer.recallMessage(options.get("topic"), options.get("handle")).getMessageId());
        }
    }

    private void transact() throws Exception {
        CountDownLatch open = new CountDownLatch(number("expect", 0));
        try (Producer producer = PROVIDER.newProducerBuilder()
            .setClientConfiguration(configuration()).setTopics(options.get("topic"))
            .setTransactionChecker(view -> {
                emit("checked", "body", body(view.getBody()), "id", view.getMessageId());
                open.countDown();
                return ending("checks", Integer.parseInt(view.getProperties().get("n")));
            }).build()) {
            for (int i = 0; i < number("count", 1); i++) {
                Message message = message(i);
                Transaction transaction = producer.beginTransaction();
                sent(message, producer.send(message, transaction));
                TransactionResolution outcome = ending("outcomes", i);
                if (outcome == TransactionResolution.COMMIT) transaction.commit();
                if (outcome == TransactionResolution.ROLLBACK) transaction.rollback();
            }
            if (!open.await(number("timeout_s", 20), TimeUnit.SECONDS)) emit("incomplete", "missing", open.getCount());
            Thread.sleep(SETTLE_MS);
        }
    }

    private TransactionResolution ending(String option, int i) {
        String[] words = text(option, "commit").split(",");
        return TransactionResolution.valueOf(words[i % words.length].toUpperCase());
    }

    // ---- the simple consumer

    private void open() throws Exception {
        SimpleConsumer consumer = PROVIDER.newSimpleConsumerBuilder().setClientConfiguration(configuration())
            .setConsumerGroup(options.get("group")).setAwaitDuration(Duration.ofSeconds(number("await_s", 5)))
            .setSubscriptionExpressions(subscription()).build();
        CONSUMERS.put(options.get("name"), consumer);
        OPEN.put(options.get("name"), consumer);
    }

    private Map<String, FilterExpression> subscription() {
        FilterExpression expression = options.containsKey("sql")
            ? new FilterExpression(options.get("sql"), FilterExpressionType.SQL92)
            : new FilterExpression(text("tag", "*"), FilterExpressionType.TAG);
        return Collections.singletonMap(options.get("topic"), expression);
    }

    private void receive() throws Exception {
        SimpleConsumer consumer = CONSUMERS.get(options.get("name"));
        for (MessageView view : consumer.receive(number("batch", 32), Duration.ofSeconds(number("hide_s", 30)))) {
            RECEIVED.put(options.get("name") + body(view.getBody()), view);
            got(view);
        }
    }

    private MessageView received(String body) {
        return RECEIVED.get(options.get("name") + body);
    }

    private void ack() throws Exception {
        for (String body : options.get("bodies").split(",")) CONSUMERS.get(options.get("name")).ack(received(body));
    }

    private void hide() throws Exception {
        CONSUMERS.get(options.get("name"))
            .changeInvisibleDuration(received(options.get("body")), Duration.ofSeconds(number("hide_s", 30)));
    }

    // ---- the push consumer

    private void push() throws Exception {
        Map<String, AtomicInteger> deliveries = new ConcurrentHashMap<>();
        CountDownLatch open = new CountDownLatch(number("expect", 1));
        PushConsumer consumer = PROVIDER.newPushConsumerBuilder().setClientConfiguration(configuration())
            .setConsumerGroup(options.get("group")).setSubscriptionExpressions(subscription())
            .setMessageListener(view -> {
                got(view);
                open.countDown();
                int delivery = deliveries.computeIfAbsent(body(view.getBody()), key -> new AtomicInteger())
                    .incrementAndGet();
                return delivery > number("fail", 0) ? ConsumeResult.SUCCESS : ConsumeResult.FAILURE;
            }).build();
        OPEN.put(options.get("name"), () -> new Thread(() -> close(consumer)).start()); // it waits for its long polls
        if (!open.await(number("timeout_s", 20), TimeUnit.SECONDS)) emit("incomplete", "missing", open.getCount());
        Thread.sleep(SETTLE_MS);
    }

    private static void close(Closeable consumer) {
        try {
            consumer.close();
        } catch (Exception error) {
            System.err.println(error);
        }
    }

    private static void got(MessageView view) {
        emit("got", "body", body(view.getBody()), "id", view.getMessageId(), "topic", view.getTopic(),
            "attempt", view.getDeliveryAttempt(), "tag", view.getTag().orElse(null),
            "key", String.join(" ", view.getKeys()), "n", view.getProperties().get("n"),
            "group", view.getMessageGroup().orElse(null), "ms", System.currentTimeMillis());
    }

    private static String body(java.nio.ByteBuffer buffer) {
        return StandardCharsets.UTF_8.decode(buffer.duplicate()).toString();
    }

    private String text(String key, String otherwise) {
        return options.getOrDefault(key, otherwise);
    }

    private int number(String key, int otherwise) {
        return Integer.parseInt(text(key, String.valueOf(otherwise)));
    }

    private static void emit(String event, Object... pairs) {
        StringBuilder line = new StringBuilder("{\"event\": ").append(json(event));
        for (int i = 0; i < pairs.length; i += 2) {
            line.append(", ").append(json(pairs[i])).append(": ").append(json(pairs[i + 1]));
        }
        synchronized (OUT) {
            OUT.println(line.append('}'));
            OUT.flush();
        }
    }

    private static String json(Object value) {
        if (value == null || value instanceof Number) return String.valueOf(value);
        StringBuilder text = new StringBuilder("\"");
        for (char letter : String.valueOf(value).toCharArray()) {
            boolean plain = letter >= ' ' && letter < 127 && letter != '"' && letter != '\\';
            text.append(plain ? String.valueOf(letter) : String.format("\\u%04x", (int) letter));
        }
        return text.append('"').toString();
    }
}
